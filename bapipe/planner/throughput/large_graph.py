"""Plans and bounds of graphs with too many downsets to search them all, on equal devices.

From a lower bound on, limits on the load rise. A plan within a limit can be cut only where the relaxation of
`window_bound` allows it, which near the bound are few of all downsets: the exact search among these finds the best
plan, or raises the bound to the limit. If not all downsets can be listed, those with few bytes are searched, which
proves nothing.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np

from bapipe.formats.profile import ModelProfile
from bapipe.graph.downsets import members
from bapipe.graph.layer_graph import Graph
from bapipe.planner.deadline import Deadline, OutOfTime
from bapipe.planner.throughput.cut_windows import CutWindows, crossing_tensors, cut_windows, work_of_nodes
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution, is_homogeneous
from bapipe.planner.throughput.loads import Boundaries
from bapipe.planner.throughput.promising_cuts import promising_downsets
from bapipe.planner.throughput.window_bound import WindowBound

MAX_LISTED = 60_000
"""Downsets that are listed, so that those that a plan can be cut at are known."""

MAX_CUTS = 3_000
"""Downsets that one search uses: a bound of its time and of its tables."""

MAX_PROMISING = 1_500
"""Downsets that one search uses if not all are listed."""

GROWTH = (1.005, 1.01, 1.02, 1.03, 1.04, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)
"""How much above the lower bound the limits are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LargeGraph:
    """A graph of layers, whose nodes are groups of layers that stay together.

    Attributes:
        listed: all downsets, None if they are more than `MAX_LISTED`.
    """

    graph: Graph
    layers_of_node: Sequence[Sequence[int]]
    profile: ModelProfile
    listed: Sequence[int] | None
    deadline: Deadline
    _windows: dict[int, CutWindows | None] = field(default_factory=dict)

    def windows(self, microbatch_size: int) -> CutWindows | None:
        """Returns the minimum cuts at a micro-batch size, None if the time is over before they are known."""
        if microbatch_size not in self._windows:
            self._windows[microbatch_size] = None
            with suppress(OutOfTime):
                self._windows[microbatch_size] = cut_windows(
                    self.graph, self.layers_of_node, self.profile, microbatch_size, deadline=self.deadline
                )
        return self._windows[microbatch_size]

    def raised_bound_ns(
        self, search: LoadSearch, limits: Sequence[int], microbatch_size: int, bound_ns: int, load_ns: int
    ) -> int:
        """Returns a lower bound at a micro-batch size, between one that is known and the load of a plan."""
        bound = self._bound(search, limits, microbatch_size) if bound_ns < load_ns else None
        return bound_ns if bound is None else ceil(bound.raised(bound_ns, load_ns))

    def improved(self, search: LoadSearch, limits: Sequence[int], solution: LoadSolution) -> LoadSolution:
        """Returns the best plan found at a solution's micro-batch size, and a raised bound of all at this size."""
        size = solution.microbatch_size
        bound = self._bound(search, limits, size)
        if bound is None:
            return solution
        least_ns = bound.raised(solution.bound_ns, solution.load_ns)
        solution = replace(solution, bound_ns=ceil(least_ns))
        node_ns = work_of_nodes(self.profile, size, self.layers_of_node)
        for growth in GROWTH:
            limit_ns = min(growth * least_ns, solution.load_ns)
            node_sets, has_all = self._cuts(bound, limit_ns, node_ns, search.boundaries.node_sets)
            if len(node_sets) > MAX_CUTS:
                break
            near = Boundaries(node_sets, self.layers_of_node, search.boundaries.num_layers)
            work_ns = np.array([sum(node_ns[node] for node in members(nodes)) for nodes in node_sets])
            try:
                found = replace(search, boundaries=near).solve_between(
                    size, limits[0], solution.bound_ns, limit_ns, bound, work_ns, self.deadline
                )
            except OutOfTime:
                break
            # All cuts of a plan below the limit were searched: its bound, or without a plan the limit, holds for all.
            if has_all:
                solution = replace(solution, bound_ns=max(solution.bound_ns, found.bound_ns))
            if found.stages:
                return replace(found, bound_ns=solution.bound_ns)
            # No plan is faster than the known one.
            if limit_ns >= solution.load_ns:
                break
        return solution

    def _cuts(
        self, bound: WindowBound, limit_ns: float, node_ns: Sequence[int], starts: Sequence[int]
    ) -> tuple[list[int], bool]:
        """Returns downsets that a plan within a limit can be cut at, and whether these are all."""
        ranges = bound.between(limit_ns)
        if self.listed is None:
            tensors = crossing_tensors(self.profile, bound.microbatch_size, self.layers_of_node)
            every_start = {*starts, *bound.windows.node_sets}
            return promising_downsets(self.graph, every_start, node_ns, tensors, ranges, MAX_PROMISING), False
        work_ns = np.array([sum(node_ns[node] for node in members(nodes)) for nodes in self.listed])
        can_be = np.logical_or.reduce([(work_ns >= least) & (work_ns <= most) for least, most in ranges or [(0, 0)]])
        can_be[[0, -1]] = True
        return [self.listed[i] for i in np.flatnonzero(can_be).tolist()], True

    def _bound(self, search: LoadSearch, limits: Sequence[int], microbatch_size: int) -> WindowBound | None:
        """Returns the relaxation at a micro-batch size, None if devices are unlike or the time is over."""
        windows = self.windows(microbatch_size) if is_homogeneous(search.cluster, limits) else None
        if windows is None:
            return None
        device = search.cluster.devices[0]
        return WindowBound(
            windows=windows,
            microbatch_size=microbatch_size,
            num_devices=len(search.cluster.devices),
            num_microbatches=search.minibatch_size // microbatch_size,
            speed=device.speed,
            link=search.cluster.link(0, len(search.cluster.devices) - 1),
            overlaps=device.overlaps_transfers,
        )
