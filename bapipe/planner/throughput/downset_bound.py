"""The fewest devices that layers before and after every downset of a graph need, if no load may exceed a limit.

Of r devices, a stage [a, b) has at least the load p_r(b) - p_r(a) of compute, p_r(b) being that of all layers before b
as one stage of r devices, and exactly so but for rounding and the latency of the all-reduce. A stage that ends at b can
therefore have r devices, and k devices before it, if the largest p_r(a) of all a inside b that k devices can reach is
large enough. This largest value passes from each downset to those one node larger, so that no pairs of downsets are
looked at: O(covers * devices**2) for each limit. Memory is left out, hence this is a relaxation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.throughput.downset_covers import Covers
from bapipe.planner.throughput.homogeneous import HomogeneousDevices

MAX_VALUES = 1 << 29
"""Values that are compared for one limit: covers times devices times replicas."""

MAX_VALUES_AT_ONCE = 1 << 24
"""Of these, those of the downsets of one size: 128 MB."""

MAX_LOAD_NS = 1 << 60
"""Loads beyond this would overflow."""

PER_CALL = 512
"""Downsets whose costs are computed in one call, with a table of all pairs of them."""

NOWHERE = -(1 << 62)
"""What a stage of so many devices begins with, if it can begin at no downset."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DownsetBound:
    """Costs of all layers before each downset, and the cover relation of all downsets.

    Attributes:
        compute_ns: of one stage of r devices, r = 1, 2, ...; [downsets, counts].
        longest_ns: the longest transfer of a micro-batch at each downset; [downsets].
        crossing_ns: what both transfers add to a load, 0 if devices transfer and compute at once; [downsets].
        times: how often a stage of r devices runs; [counts].
        rounding_ns: how much less a stage of r devices may take than the difference of two of `compute_ns`; [counts].
    """

    covers: Covers
    num_devices: int
    compute_ns: Ints
    longest_ns: Ints
    crossing_ns: Ints
    times: Ints
    rounding_ns: Ints

    def before(self, limit_ns: int, deadline: Deadline) -> Ints:
        """Returns the fewest devices that run the layers before each downset, one too many if none can. [downsets]

        No plan with less has all loads within the limit; memory and what comes after the downset are left out.
        """
        return self._fewest(limit_ns, True, np.full(len(self.longest_ns), self.num_devices), deadline)

    def after(self, limit_ns: int, before: Ints, deadline: Deadline) -> Ints:
        """Returns the fewest devices that run the layers after each downset, one too many if none can. [downsets]

        Args:
            before: the fewest devices before each downset; no stage begins where too few devices are left.
        """
        return self._fewest(limit_ns, False, self.num_devices - before, deadline)

    def path(self, limit_ns: int, before: Ints) -> list[int]:
        """Returns the downsets between the stages of a relaxed plan, the empty one and all layers among them.

        Args:
            before: the fewest devices before each downset; there is a plan if the last is at most `num_devices`.
        """
        counts = np.arange(1, self.compute_ns.shape[1] + 1)
        possible = self._possible(limit_ns)
        path = [len(before) - 1]
        while path[-1]:
            end = path[-1]
            inside = ~(self.covers.packed & ~self.covers.packed[end]).any(axis=1)
            inside[end] = False  # a stage is not empty
            loads = self.compute_ns[end] - self.compute_ns
            loads += (self.crossing_ns[end] + self.crossing_ns)[:, None] * self.times - self.rounding_ns
            # The devices before the stage and its own are no more than those that reach its end.
            good = inside[:, None] & possible & possible[end] & (loads <= limit_ns)
            good &= before[:, None] + counts <= before[end]
            best = np.where(good, loads, np.iinfo(np.int64).max).min(axis=1)
            path.append(int(best.argmin()))
        return path[::-1]

    def _possible(self, limit_ns: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
        """Returns whether a stage of r devices can begin or end at each downset. [downsets, counts]"""
        found: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = self.longest_ns[:, None] * self.times <= limit_ns
        return found

    def _fewest(self, limit_ns: int, is_growing: bool, most: Ints, deadline: Deadline) -> Ints:
        """Returns the fewest devices on one side of each downset. [downsets]

        Args:
            most: devices up to which another stage can follow; [downsets].
        """
        # From the end backwards, the stage [b, e) has -p(b) - (-p(e)): the same problem with the signs changed.
        steps = self.covers.growing if is_growing else self.covers.shrinking
        start = 0 if is_growing else len(self.longest_ns) - 1
        potential = self.compute_ns if is_growing else -self.compute_ns
        possible = self._possible(limit_ns)
        crossing_ns = self.crossing_ns[:, None] * self.times
        stage_begins = np.where(possible, potential - crossing_ns, NOWHERE)
        # A stage that ends here is within the limit if it begins with at least this.
        needed = potential + crossing_ns - self.rounding_ns - limit_ns
        counts = np.arange(1, self.compute_ns.shape[1] + 1)
        used = np.arange(self.num_devices)[:, None]  # devices of all stages before: [devices, 1]
        fewest: Ints = np.full(len(self.longest_ns), self.num_devices + 1, dtype=np.int64)
        fewest[start] = 0
        # The largest `stage_begins` that so many devices reach on this side: [downsets, devices, counts]
        largest = np.broadcast_to(stage_begins[start], (1, self.num_devices, len(counts)))
        for step in steps:
            deadline.check()
            own = slice(step.first, step.stop)
            largest = np.maximum.reduceat(largest[step.near - step.first_before], step.offsets, axis=0)
            too_few = (largest < needed[own, None, :]).sum(axis=1)  # more devices reach more: [downsets, counts]
            total = np.where((too_few < self.num_devices) & possible[own], too_few + counts, self.num_devices + 1)
            fewest[own] = np.minimum(total.min(axis=1), self.num_devices + 1)
            # Only now the next stage can begin at these downsets themselves.
            begins = (fewest[own, None, None] <= used) & (fewest[own] <= most[own])[:, None, None]
            largest = np.maximum(largest, np.where(begins, stage_begins[own, None, :], NOWHERE))
        return fewest


def downset_bound(
    covers: Covers, listed: Sequence[int], problem_of: Callable[[Sequence[int]], HomogeneousDevices], deadline: Deadline
) -> DownsetBound | None:
    """Returns the bound for all downsets of a graph, None if they are too many for so many devices.

    Args:
        listed: all downsets, smaller ones first.
        problem_of: makes the problem that has some downsets as its boundaries.

    Raises:
        OutOfTime: the deadline passed.
    """
    blocks = []
    for first in range(0, len(listed), PER_CALL):
        deadline.check()
        # All costs are those of the layers since the empty downset.
        some = problem_of([0, *listed[first : first + PER_CALL]])
        blocks.append(some.costs_before())
        num_values = some.num_devices * some.max_replicas
        if num_values * max(len(step.near) for step in covers.growing) > MAX_VALUES_AT_ONCE:
            return None
        if num_values * sum(len(step.near) for step in covers.growing) > MAX_VALUES:
            return None
    compute_ns, longest_ns, crossing_ns = (np.concatenate(column) for column in zip(*blocks, strict=True))
    # Differences and sums of these must have 63 bits.
    if max(int(compute_ns.max()), int(longest_ns.max()) * some.num_microbatches) > MAX_LOAD_NS:
        return None
    return DownsetBound(
        covers=covers,
        num_devices=some.num_devices,
        compute_ns=compute_ns,
        longest_ns=longest_ns,
        crossing_ns=crossing_ns,
        times=-(-some.num_microbatches // np.arange(1, some.max_replicas + 1)),
        rounding_ns=some.rounding_of_stages_ns(),
    )
