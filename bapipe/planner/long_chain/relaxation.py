"""Decides whether any plan of a long chain can be within a step time: a relaxation solved by dynamic programming.

For a limit T, each placement may hold the intervals that `feasible_intervals.py` allows: a range of ends per begin. The
minimum round trip of one micro-batch, from a boundary to the end of the chain and back, is then a minimum over a range
of ends: a range-minimum query. Within T there must also be time

  - for (M - 1) // d + 1 round trips one after another, with M micro-batches of which at most d are in flight;
  - for all micro-batches on the busiest link;
  - for the disjoint work of the bottleneck replica: its other r, and the F that cannot run during a round trip.

These follow from the bounds of `branch_and_bound/lower_bound.py`; the work of each stage is in the feasible intervals.
If no round trip from the start of the chain remains, every plan takes longer than T. O(P * (N + log B) * B) for P
placements with N successors each and B boundaries.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.branch_and_bound.cost_to_go import sharing_key
from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.long_chain.feasible_intervals import BottleneckReplica, FeasibleIntervals
from bapipe.planner.stages.intervals import INF, IntArray
from bapipe.planner.stages.placements import StagePlacement

Path = tuple[tuple[int, ...], tuple[StagePlacement, ...]]
"""A complete plan: the boundaries at which stages begin and end, and their placements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """From a placement to those of its successors that have equal transfer times.

    Attributes:
        stages: the indices of the successors among the stages of the relaxation. [successors]
        transfer_ns: both transfers of one micro-batch. [boundaries]
        busy_link_ns: the same if all micro-batches on the busiest link must cross it in one direction; the minimum over
            the successors. [boundaries]
    """

    stages: IntArray
    transfer_ns: IntArray
    busy_link_ns: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedStage:
    """A placement, with all that does not depend on the limit.

    Attributes:
        microbatch_sums: F and r of one micro-batch, summed over the layers before each boundary. [boundaries]
        forward_sums: the same for F. [boundaries]
        bottleneck: the replica with the most micro-batches.
        plain_ends, recompute_ends: for each begin, the last end that may fit in memory without and with recomputation.
            [boundaries]
        transitions: the transitions to all successors.
        num_rounds: how many round trips must follow one after another.
    """

    placement: StagePlacement
    microbatch_sums: IntArray
    forward_sums: IntArray
    bottleneck: BottleneckReplica
    plain_ends: IntArray
    recompute_ends: IntArray
    transitions: tuple[Transition, ...]
    num_rounds: int


class Relaxation:
    """The relaxation of a problem, for the pipelines that begin with some placements and continue with `successors`."""

    def __init__(
        self,
        problem: Problem,
        feasible: FeasibleIntervals,
        first_placements: Sequence[StagePlacement],
        successors: Callable[[StagePlacement], Sequence[StagePlacement]],
    ) -> None:
        self.problem, self.feasible, self._successors = problem, feasible, successors
        self._deadline = problem.deadline
        self.last_boundary = problem.lower_bound.costs.intervals.num_boundaries - 1
        self._number: dict[StagePlacement, int] = {}
        self._stages: list[RelaxedStage] = []  # successors before predecessors
        for placement in first_placements:
            self._add_in_postorder(placement)
        self._first = sorted({self._number[placement] for placement in first_placements})
        shape = len(self._stages), self.last_boundary + 1
        # For the last limit: the minimum round trip of a stage that begins at each boundary and all later ones; of what
        # follows a stage that ends there, with its transfers; and the last end for each begin. All [stages, boundaries]
        self._round_trip, self._beyond = np.full(shape, INF), np.full(shape, INF)
        self._last_end = np.zeros(shape, dtype=np.int64)

    def _add_in_postorder(self, placement: StagePlacement) -> None:
        """Adds a placement and all that can follow it, each after its successors."""
        stack = [placement]  # no recursion, because pipelines may be very long
        while stack:
            missing = [other for other in self._successors(stack[-1]) if other not in self._number]
            if missing:
                stack += missing
                continue
            self._deadline.check()
            top = stack.pop()
            if top not in self._number:
                self._number[top] = len(self._stages)
                self._stages.append(self._relaxed_stage(top))

    def _relaxed_stage(self, placement: StagePlacement) -> RelaxedStage:
        """Returns what is known of a placement for any limit."""
        # One minimum serves all successors with equal transfer times.
        groups: dict[bytes, list[tuple[int, IntArray, IntArray]]] = {}
        for other in self._successors(placement):
            transfer_ns, busy_link_ns = self.feasible.transfers(self.problem.lower_bound, placement, other)
            groups.setdefault(transfer_ns.tobytes(), []).append((self._number[other], transfer_ns, busy_link_ns))
        transitions = [
            Transition(
                stages=np.array([number for number, _, _ in group]),
                transfer_ns=group[0][1],
                busy_link_ns=np.minimum.reduce([busy_link_ns for _, _, busy_link_ns in group]),
            )
            for group in groups.values()
        ]
        plain_ends, recompute_ends = self.feasible.memory_ends(placement)
        return RelaxedStage(
            placement=placement,
            microbatch_sums=self.feasible.microbatch_sums(placement),
            forward_sums=self.feasible.forward_sums(placement),
            bottleneck=self.feasible.bottleneck(placement, self.problem.lower_bound),
            plain_ends=plain_ends,
            recompute_ends=recompute_ends,
            transitions=tuple(transitions),
            num_rounds=(self.problem.num_microbatches - 1) // placement.schedule.max_in_flight + 1,
        )

    def is_feasible(self, limit_ns: int) -> bool:
        """Returns whether the relaxation has a pipeline within a step time. If not, every plan takes longer."""
        for number, stage in enumerate(self._stages):
            self._deadline.check()
            self._solve(number, stage, self._feasible_ends(stage, limit_ns), limit_ns)
        return self._has_path()

    def possible_intervals(self, limit_ns: int) -> dict[Hashable, IntArray]:
        """Returns the indices of the intervals that a stage can have in a pipeline within a step time.

        By `sharing_key` of the stage's placement; {} if there is no such pipeline. Every stage of a plan within the
        limit has one of these intervals. Each begins where a possible stage ends, and has a possible continuation.
        """
        if not self.is_feasible(limit_ns):
            return {}
        possible: dict[Hashable, IntArray] = {}
        intervals = self.problem.lower_bound.costs.intervals
        is_begin = np.zeros(self._round_trip.shape, dtype=bool)  # whether a possible stage before ends there
        is_begin[self._first, 0] = True
        for number in reversed(range(len(self._stages))):  # predecessors before successors
            self._deadline.check()
            begins = np.flatnonzero(is_begin[number] & (self._round_trip[number] < INF))
            counts = np.maximum(self._last_end[number][begins] - begins, 0)
            # All intervals of each begin up to its last end.
            begin_of = np.repeat(begins, counts)
            ends = begin_of + 1 + np.arange(len(begin_of)) - np.repeat(np.cumsum(counts) - counts, counts)
            can_continue = self._beyond[number][ends] < INF
            begin_of, ends = begin_of[can_continue], ends[can_continue]
            key = sharing_key(self._stages[number].placement)
            numbers = intervals.numbers(begin_of, ends)
            possible[key] = np.union1d(possible[key], numbers) if key in possible else numbers
            is_end = np.zeros(self.last_boundary + 1, dtype=bool)
            is_end[ends] = True
            for transition in self._stages[number].transitions:
                is_begin[transition.stages] |= is_end
        return possible

    def is_balanced(self, microbatch_ns: int) -> bool:
        """Returns whether there is a pipeline of which no stage takes longer than this per micro-batch.

        Its step time is not limited.
        """
        for number, stage in enumerate(self._stages):
            sums = stage.microbatch_sums
            # Prefix sums ascend: a binary search gives the last end for each begin.
            last_end = np.searchsorted(sums, sums + microbatch_ns, side="right") - 1
            self._solve(number, stage, np.minimum(last_end, stage.recompute_ends), INF >> 1)
        return self._has_path()

    def _has_path(self) -> bool:
        """Returns whether a round trip from the start of the chain remains."""
        return bool(self._round_trip[self._first, 0].min() < INF)

    def _feasible_ends(self, stage: RelaxedStage, limit_ns: int) -> IntArray:
        """Returns for each begin the last end within time and memory, both without or both with recomputation.

        [boundaries]
        """
        plain, recomputed = self.feasible.time_ends(self.feasible.limits(stage.placement), limit_ns)
        ends: IntArray = np.maximum(np.minimum(plain, stage.plain_ends), np.minimum(recomputed, stage.recompute_ends))
        return ends

    def _solve(self, number: int, stage: RelaxedStage, last_end: IntArray, limit_ns: int) -> None:
        """Computes the minimum round trip from each begin of one stage, from those of its successors.

        Args:
            last_end: for each begin the last end that the stage may have. [boundaries]
        """
        before, sums = self.feasible.trip_before_ns, stage.microbatch_sums
        # 1. The minimum round trip of what follows a stage that ends at each boundary. All arrays are [boundaries].
        beyond = np.full(self.last_boundary + 1, INF)
        if stage.placement.is_last:
            beyond[-1] = 0
        for transition in stage.transitions:
            round_trip = self._round_trip[transition.stages].min(axis=0)
            in_time = round_trip + transition.busy_link_ns + before <= limit_ns  # bound: link
            beyond = np.minimum(beyond, np.where(in_time, round_trip + transition.transfer_ns, INF))
        self._beyond[number] = beyond
        # 2. The disjoint work of [begin, end) must fit beside a round trip. Its sums ascend, so binary search finds the
        #    last end; for all ends the shortest round trip counts, `from_start.min()`.
        from_start = np.minimum(beyond + sums, INF)
        disjoint = stage.bottleneck.disjoint_work_sums
        room = limit_ns - from_start.min() - before + sums
        last_end = np.minimum(last_end, np.searchsorted(disjoint, room + disjoint, side="right") - 1)
        self._last_end[number] = last_end
        # 3. The minimum over the ends of each begin; then all rounds, one after another, must fit.
        path = range_min(from_start, last_end) - sums
        path[path > INF >> 1] = INF
        rounds_ns = stage.num_rounds * np.minimum(path, INF // stage.num_rounds)
        if stage.placement.schedule.has_split_backward:
            # The first stage has no r; its W, which is all of its B, need only follow the last round.
            forwards_ns = (stage.num_rounds - 1) * np.minimum(beyond + stage.forward_sums, INF // stage.num_rounds)
            rounds_ns[0] = (from_start + forwards_ns)[1 : last_end[0] + 1].min(initial=INF)
        path[before + rounds_ns > limit_ns] = INF
        path[-1] = INF  # a stage has at least one layer
        self._round_trip[number] = path

    def best_path(self) -> Path | None:
        """Returns the path with the minimum round trip for the last limit; None if it leads to no stage that fits."""
        number = min(self._first, key=lambda first: int(self._round_trip[first][0]))
        costs = self.problem.lower_bound.costs
        boundaries, placements = [0], []
        while True:
            self._deadline.check()
            stage, begin = self._stages[number], boundaries[-1]
            fits = costs.candidates_from(stage.placement, begin).fits
            ends = np.arange(begin + 1, int(self._last_end[number][begin]) + 1)
            # The relaxation underestimates memory; the path takes only stages that fit.
            ends = ends[fits[: len(ends)]]
            round_trips = stage.microbatch_sums[ends] + self._beyond[number][ends]
            if len(ends) == 0 or round_trips.min() >= INF:
                return None
            end = int(ends[np.argmin(round_trips)])
            boundaries.append(end)
            placements.append(stage.placement)
            if stage.placement.is_last:
                return tuple(boundaries), tuple(placements)
            # The successor with the shortest transfers and round trip from this cut.
            number = min(
                (int(self._round_trip[other][end] + transition.transfer_ns[end]), int(other))
                for transition in stage.transitions
                for other in transition.stages
            )[1]


def range_min(values: IntArray, last: IntArray) -> IntArray:
    """Returns for every i the minimum of values[i + 1 .. last[i]], `INF` if that is empty. O(n log n). [n]

    With a sparse table: row k has the minimum of the 2^k values from each index on, and two such ranges that overlap
    cover any range (Bender and Farach-Colton 2000, "The LCA problem revisited", section 3).
    """
    size = len(values)
    rows = [values]
    width = 1
    while 2 * width < size:
        row = rows[-1].copy()
        np.minimum(row[: size - width], rows[-1][width:], out=row[: size - width])
        rows.append(row)
        width *= 2
    first = np.arange(1, size + 1)
    count = last - first + 1
    level = np.frexp(np.maximum(count, 1).astype(float))[1] - 1  # floor(log2(count))
    table = np.stack(rows)
    from_first = table[level, np.minimum(first, size - 1)]
    to_last = table[level, np.maximum(last - (1 << level) + 1, 0)]
    minima: IntArray = np.where(count > 0, np.minimum(from_first, to_last), INF)
    return minima
