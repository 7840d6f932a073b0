"""Plans and bounds of graphs with too many downsets to search every pair of them, on equal devices.

If all downsets can be listed, `downset_bound` says for any limit on the load whether a plan can be within it, up to
memory and rounding, and along which downsets; bisection brings bound and plan together. Otherwise the bound is that of
`window_bound`.

Then, from the lower bound on, limits rise. A plan within a limit can be cut only where the relaxation allows it, which
near the bound are few of all downsets: the exact search among these finds the best plan, or raises the bound to the
limit. If not all downsets can be listed, those with few bytes are searched, which proves nothing.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.graph.downsets import members
from bapipe.graph.layer_graph import Graph
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.throughput.cut_windows import CutWindows, crossing_tensors, cut_windows, work_of_nodes
from bapipe.planner.throughput.downset_bound import DownsetBound, downset_bound
from bapipe.planner.throughput.downset_covers import Covers, covers_of
from bapipe.planner.throughput.homogeneous import HomogeneousDevices
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution
from bapipe.planner.throughput.loads import Boundaries
from bapipe.planner.throughput.promising_cuts import promising_downsets
from bapipe.planner.throughput.window_bound import WindowBound

if TYPE_CHECKING:
    from bapipe.planner.throughput.homogeneous import DevicesAround

MAX_LISTED = 60_000
"""Downsets that are listed, so that those that a plan can be cut at are known."""

MAX_CUTS = 3_000
"""Downsets that one search uses: a bound of its time and of its tables."""

MAX_PROMISING = 1_500
"""Downsets that one search uses if not all are listed."""

GROWTH = (1.005, 1.01, 1.02, 1.03, 1.04, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0, 16.0)
"""How much above the lower bound the limits are."""

CLOSE = 1e-5
"""Bisection over all downsets ends when the limits without and with a relaxed plan are within this share."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DownsetsToCut:
    """Downsets that a plan within a limit may be cut at, among them the empty one and that of all nodes.

    Attributes:
        has_all: whether such a plan can be cut nowhere else.
        devices_around: lower bounds on the devices before and after each, for this limit and lower ones.
    """

    node_sets: Sequence[int]
    has_all: bool
    devices_around: "DevicesAround"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LargeGraph:
    """A graph of layers, whose nodes are groups of layers that stay together.

    Attributes:
        cluster: of devices that are all alike.
        listed: all downsets, smaller ones first; None if they are more than `MAX_LISTED`.
    """

    graph: Graph
    layers_of_node: Sequence[Sequence[int]]
    profile: ModelProfile
    cluster: Cluster
    listed: Sequence[int] | None
    deadline: Deadline
    _windows: dict[int, CutWindows | None] = field(default_factory=dict)
    _covers: list[Covers] = field(default_factory=list)

    def windows(self, microbatch_size: int) -> CutWindows | None:
        """Returns the minimum cuts at a micro-batch size, None if the time is over before they are known."""
        if microbatch_size not in self._windows:
            self._windows[microbatch_size] = None
            with suppress(OutOfTime):
                self._windows[microbatch_size] = cut_windows(
                    self.graph,
                    self.layers_of_node,
                    self.profile,
                    self.cluster,
                    microbatch_size,
                    deadline=self.deadline,
                )
        return self._windows[microbatch_size]

    def improved(self, search: LoadSearch, solution: LoadSolution) -> LoadSolution:
        """Returns the best plan found at a solution's micro-batch size, and a raised bound of all at this size."""
        if solution.bound_ns >= solution.load_ns or not search.is_homogeneous:
            return solution
        by_downsets = self.downset_bound(search, solution.microbatch_size)
        if by_downsets is not None:
            return self._narrowed(search, solution, by_downsets)
        by_windows = self._window_bound(search, solution.microbatch_size)
        if by_windows is None:
            return solution
        least_ns = by_windows.raised(solution.bound_ns, solution.load_ns)
        return self._searched_near(search, replace(solution, bound_ns=ceil(least_ns)), by_windows)

    def below(self, search: LoadSearch, solution: LoadSolution, load_ns: int) -> LoadSolution:
        """Returns a plan at a solution's micro-batch size with less than a load, with a raised bound of this size.

        There are no stages if none was found; without a list of all downsets none is looked for.
        """
        known = replace(solution, load_ns=load_ns, stages=())
        if known.bound_ns >= load_ns or not search.is_homogeneous:
            return known
        by_downsets = self.downset_bound(search, solution.microbatch_size)
        if by_downsets is not None:
            return self._narrowed(search, known, by_downsets)
        by_windows = self._window_bound(search, solution.microbatch_size)
        return replace(known, bound_ns=ceil(by_windows.raised(known.bound_ns, load_ns))) if by_windows else known

    def _narrowed(self, search: LoadSearch, solution: LoadSolution, bound: DownsetBound) -> LoadSolution:
        """Returns the best plan along relaxed plans, for limits between the bound and the load of a plan."""
        assert self.listed is not None
        least_ns, most_ns = solution.bound_ns, solution.load_ns  # of a relaxed plan
        bisects = True
        with suppress(OutOfTime):
            while most_ns - least_ns > CLOSE * least_ns:
                # Loads are whole: if the best plan is the optimum, a limit just below it ends the search.
                limit_ns = (least_ns + most_ns) // 2 if bisects else most_ns - 1
                bisects = not bisects
                before = bound.before(limit_ns, self.deadline)
                if before[-1] > bound.num_devices:
                    least_ns = limit_ns + 1
                    continue
                most_ns = limit_ns
                # The relaxed plan may not fit, or have a slightly larger load: the best plan with its cuts is real.
                along = [self.listed[i] for i in bound.path(limit_ns, before)]
                found = self._along(search, along).solve(solution.microbatch_size, deadline=self.deadline)
                if found.stages and found.load_ns < solution.load_ns:
                    solution = found
                    most_ns = min(most_ns, found.load_ns)
        solution = replace(solution, bound_ns=least_ns)
        return self._searched_near(search, solution, bound)

    def _searched_near(
        self, search: LoadSearch, solution: LoadSolution, bound: DownsetBound | WindowBound
    ) -> LoadSolution:
        """Returns the best plan of the exact search among the cuts that are possible near the bound."""
        least_ns = solution.bound_ns
        for growth in GROWTH if least_ns < solution.load_ns else ():
            limit_ns = min(ceil(growth * least_ns), solution.load_ns)
            try:
                cuts = self._possible_cuts(search, bound, limit_ns)
                if len(cuts.node_sets) > MAX_CUTS:
                    break
                found = self._along(search, cuts.node_sets).solve_between(
                    solution.microbatch_size, solution.bound_ns, limit_ns, cuts.devices_around, self.deadline
                )
            except OutOfTime:
                break
            # All cuts of a plan below the limit were searched: its bound, or without a plan the limit, holds for all.
            if cuts.has_all:
                solution = replace(solution, bound_ns=max(solution.bound_ns, found.bound_ns))
            # The exact search has found the best plan below the limit.
            if found.stages:
                return replace(found, bound_ns=solution.bound_ns)
            # No plan is faster than the known one.
            if limit_ns >= solution.load_ns:
                break
        return solution

    def _along(self, search: LoadSearch, node_sets: Sequence[int]) -> LoadSearch:
        """Returns the search with other boundaries, which are not all."""
        near = Boundaries(node_sets, self.layers_of_node, search.boundaries.num_layers)
        return replace(search, boundaries=near, has_all_downsets=False)

    def _possible_cuts(self, search: LoadSearch, bound: DownsetBound | WindowBound, limit_ns: int) -> DownsetsToCut:
        """Returns downsets that a plan within a limit can be cut at."""
        if isinstance(bound, DownsetBound):
            return self._possible_downsets(bound, limit_ns)
        node_ns = work_of_nodes(self.profile, self.cluster, bound.microbatch_size, self.layers_of_node)
        ranges = bound.between(limit_ns)
        if self.listed is None:
            tensors = crossing_tensors(self.profile, bound.microbatch_size, self.layers_of_node)
            starts = {*search.boundaries.node_sets, *bound.windows.node_sets}
            node_sets = promising_downsets(self.graph, starts, node_ns, tensors, ranges, MAX_PROMISING)
        else:
            work_ns = _sums(node_ns, self.listed)
            is_possible = [(work_ns >= least) & (work_ns <= most) for least, most in ranges or [(0, 0)]]
            can_be = np.logical_or.reduce(is_possible)
            can_be[[0, -1]] = True
            node_sets = [self.listed[i] for i in np.flatnonzero(can_be).tolist()]
        around = partial(bound.devices_around, _sums(node_ns, node_sets))
        return DownsetsToCut(node_sets=node_sets, has_all=self.listed is not None, devices_around=around)

    def _possible_downsets(self, bound: DownsetBound, limit_ns: int) -> DownsetsToCut:
        assert self.listed is not None
        before = bound.before(limit_ns, self.deadline)
        after = bound.after(limit_ns, before, self.deadline)
        can_be = before + after <= bound.num_devices
        can_be[[0, -1]] = True
        counts = before[can_be], after[can_be]
        return DownsetsToCut(
            node_sets=[self.listed[i] for i in np.flatnonzero(can_be).tolist()],
            has_all=True,
            devices_around=lambda _: (counts[0].copy(), counts[1].copy()),
        )

    def _window_bound(self, search: LoadSearch, microbatch_size: int) -> WindowBound | None:
        """Returns the relaxation by windows at a micro-batch size, None if the time is over."""
        windows = self.windows(microbatch_size)
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

    def downset_bound(self, search: LoadSearch, microbatch_size: int) -> DownsetBound | None:
        """Returns the relaxation over all downsets at a micro-batch size, None if they are too many or out of time."""
        if self.listed is None:
            return None
        # The same for every micro-batch size.
        if not self._covers:
            self._covers.append(covers_of(self.graph, self.listed))

        def problem_of(node_sets: Sequence[int]) -> HomogeneousDevices:
            return self._along(search, node_sets).homogeneous(microbatch_size)

        with suppress(OutOfTime):
            return downset_bound(self._covers[0], self.listed, problem_of, self.deadline)
        return None


def _sums(node_ns: Sequence[int], node_sets: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Returns the work of the nodes of each set."""
    return np.array([sum(node_ns[node] for node in members(nodes)) for nodes in node_sets], dtype=np.int64)
