"""Admissible lower bounds on the step time of partial plans: the first stages are placed, the others are not.

Notation, for stage s of a plan (docs/algorithm.md has the proofs):

    f, b    times of F and of the backward of a micro-batch, B or I + W
    r       the part of the backward that must end before the stage before can begin its own: B, or I if it is split (0
            if the stage sends no gradient back, as the first one: its W is then all of its B)
    x, y    transfer times of a micro-batch's activations to stage s + 1 and of its gradients back
    e       what must follow the last r of the stage: W if it is separate, the all-reduces, the update
    M, n    micro-batches of the step, and of one replica
    d       maximum in flight: F of micro-batch m + d follows r of micro-batch m on the same replica
    a       F of micro-batch m + a precedes r of micro-batch m on the same replica

If replicas differ, times are minima over them. On devices that cannot compute while they transfer, f and r contain the
transfers that must be over as well. The bounds, by name; a step cannot be shorter than

    work              for one replica: reach stage s, do all its work, synchronize, update:
                          sum_{i<s} (f + x) + n (f_s + b_s) + e_s
                      and replica k begins only after the stages before have run F of micro-batch k
    return            for one replica: reach stage s, do all its F and r, go back to a stage j <= s, finish there:
                          sum_{i<s} (f + x) + n (f_s + r_s) + max_j (sum_{j<=i<s} (y + r) + e_j)
    link              the same with one direction of one link in place of the replica: one micro-batch makes the way to
                      the last stage and back before or after all micro-batches cross the link
    round trip        one micro-batch goes from stage s to the last stage and back; then follow all r of a replica but
                      the first, and the F that the order puts after that first r
    last micro-batch  F of the last micro-batch reaches stage s when every stage before has passed it on; then it goes
                      to the last stage and back to any stage j, which finishes. Stage i passes it on after
                        - the F before it on its replica, and the r that its order puts before it
                        - (M - 1) / d_i round trips from stage i to the last stage, one after another
    zigzag            as before, but stage i passes it on after round trips from stage i to stage s only: F of
                      micro-batch m goes from i to s, where r of m - a_s follows it; that comes back to i, where F of
                      m - a_s + d_i follows it, and so on
    shared device     for devices with several stages: the maximum work of one of them, and the mean over all
    forwards first    for schedules with all F of a device before its first backward (GPipe): F of one of the final
                      micro-batches leaves a stage only after k others, sum (f + x) + max (k f, k x); from there on
                      only backwards remain: one micro-batch goes back to stage s, the other r follow, then back to j

Each bound has two sides: `stage_bound.py` and `next_stage.py` compute it for the stages placed so far and the next one,
`cost_to_go.py` for all stages still to come. A child's bound is the maximum over the bounds of prefix + next stage +
cost-to-go. Every line that computes a bound names it.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from copy import copy

import numpy as np

from bapipe.planner.branch_and_bound.cost_to_go import CostToGo, CostToGoTable, Transitions
from bapipe.planner.branch_and_bound.next_stage import Extension, NextStageBounds
from bapipe.planner.branch_and_bound.partial_plan import PartialPlan, PlacedStage
from bapipe.planner.branch_and_bound.stage_bound import (
    BOUND_NAMES,
    FORWARDS_FIRST,
    LAST_MICROBATCH,
    SHARED_DEVICE,
    clip_inf,
    maximum,
)
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.stages.intervals import INF, IntArray
from bapipe.planner.stages.placements import StagePlacement
from bapipe.planner.stages.stage_candidates import StageCandidates, StageCostTable


class LowerBound:
    """The bounds of one schedule and micro-batch size."""

    def __init__(
        self,
        costs: StageCostTable,
        num_microbatches: int,
        *,
        forwards_first: bool,
        sync_limits_ns: Sequence[int] = (),
        enabled: Set[str] = BOUND_NAMES,
        deadline: Deadline = UNLIMITED,
    ) -> None:
        """`enabled` are the bounds to use, by name: with fewer, every lower bound is at most as high."""
        self.costs, self.num_microbatches = costs, num_microbatches
        self._forwards_first = forwards_first and FORWARDS_FIRST in enabled
        self._enabled, self._sync_limits_ns, self._deadline = enabled, tuple(sync_limits_ns), deadline
        self._next_stage = NextStageBounds(
            transfers=costs.transfers,
            num_microbatches=num_microbatches,
            forwards_first=self._forwards_first,
            enabled=enabled,
        )
        self._make_tables(None)

    def narrowed(self, rows: Mapping[Hashable, IntArray]) -> "LowerBound":
        """Returns the bounds of plans in which stages on a placement have some intervals only.

        Args:
            rows: their numbers, by `sharing_key`.
        """
        other = copy(self)
        other._make_tables(rows)
        return other

    def _make_tables(self, rows: Mapping[Hashable, IntArray] | None) -> None:
        def table(limits_ns: Sequence[int]) -> CostToGoTable:
            return CostToGoTable(
                self.costs,
                self.num_microbatches,
                limits_ns,
                forwards_first=self._forwards_first,
                enabled=self._enabled,
                deadline=self._deadline,
                rows=rows,
            )

        # Two tables: roots and `extend` need one number per quantity, which one sync class gives; `children` needs the
        # strong bounds, and takes the minimum over the classes at the end.
        self.cost_to_go = table(())
        self._cost_to_go_by_class = table(self._sync_limits_ns)

    def roots(
        self, first: tuple[StagePlacement, ...], num_positions: int, known_ns: int = 0
    ) -> Iterator[tuple[int, PartialPlan]]:
        """Yields the bound and the empty plan for each first placement from which some completion may fit.

        Args:
            first: the placements that the first stage can have.
            num_positions: the number of devices if these have several stages, else 0.
            known_ns: a lower bound of all these plans.
        """
        for placement in first:
            partial = PartialPlan((0,), (placement,), work_ns=(0,) * num_positions, bound_ns=known_ns)
            bound_ns = max(known_ns, self._root_bound_ns(partial, self.cost_to_go.of(placement)))
            # An infinite cost-to-go proves that these devices have no feasible completion.
            if bound_ns < INF:
                yield bound_ns, partial

    def children(self, partial: PartialPlan) -> tuple[IntArray, IntArray, IntArray]:
        """Returns for every child its bound, the end of the next stage, and the number of the placement after it.

        A child fixes the end of the next stage and the successor that follows it; -1 stands for none, after the last
        stage. Bounds are `INF` for children that do not fit. All three: [children]
        """
        placement, begin = partial.placements[-1], partial.boundaries[-1]
        stage = self.costs.candidates_from(placement, begin)
        if placement.is_last:
            return self._last_children(partial, stage.select(len(stage.fits) - 1))
        transitions = self._cost_to_go_by_class.transitions(placement)
        if transitions is None:
            none = np.zeros(0, dtype=np.int64)
            return none, none, none
        # All boundaries after `begin`, also those at which the stage does not fit. [ends]
        ends = np.arange(begin + 1, begin + 1 + len(stage.fits))
        num_successors = len(placement.successors)
        bounds = self._child_bounds_ns(partial, stage, transitions.select(slice(None), slice(begin + 1, None)))
        # A completion is in one of the sync classes. [N * C, ends] -> [N, ends]
        bounds = bounds.reshape(num_successors, self._cost_to_go_by_class.num_classes, len(ends)).min(axis=1)
        # The children in the order of the flattened [N, ends] array: successor by successor.
        numbers = np.repeat(np.arange(num_successors), len(ends))
        return np.where(stage.fits, bounds, INF).ravel(), np.tile(ends, num_successors), numbers

    def _last_children(self, partial: PartialPlan, stage: StageCandidates) -> tuple[IntArray, IntArray, IntArray]:
        """The only child of a partial plan whose next stage is the last: it takes all layers that remain."""
        next_stage = self._next_stage.bound(partial, stage, None)
        bounds = np.maximum(next_stage.step_ns, partial.bound_ns)
        if self._forwards_first:
            extended = self._next_stage.extend(partial, stage, next_stage, None)
            # Bound "forwards first" for the last stage: when all F are over, and what follows its first r.
            forwards_first_ns = extended.first_arrival_ns + extended.forwards_ns + extended.backwards_tail_ns
            bounds = np.maximum(bounds, forwards_first_ns)
        end = self.costs.intervals.num_boundaries - 1
        return np.where(stage.fits, clip_inf(bounds), INF).ravel(), np.array([end]), np.array([-1])

    def extend(self, partial: PartialPlan, end: int, number: int) -> PartialPlan:
        """Returns the partial plan with the next stage ended at a boundary, then a successor given by number."""
        placement, begin = partial.placements[-1], partial.boundaries[-1]
        # One interval, so all arrays have one entry. The class of the completion is not known yet, so `extend` takes
        # the table without sync classes, which holds for every completion.
        stage = self.costs.candidates_from(placement, begin).select(end - begin - 1)
        transitions = None if placement.is_last else self.cost_to_go.transitions(placement)
        if transitions is not None:
            transitions = transitions.select(slice(number, number + 1), slice(end, end + 1))
        next_stage = self._next_stage.bound(partial, stage, transitions)
        extended = self._next_stage.extend(partial, stage, next_stage, transitions)
        f, r = int(stage.forward_ns[0]), int(stage.critical_backward_ns[0])
        x, y = (0, 0) if transitions is None else (int(transitions.send_ns[0, 0]), int(transitions.grad_ns[0, 0]))
        work_ns, position = partial.work_ns, placement.position
        # Bound "shared device": work adds up over the stages of a device.
        if position is not None:
            added_ns = work_ns[position] + self.num_microbatches * int(stage.microbatch_ns[0])
            work_ns = (*work_ns[:position], added_ns, *work_ns[position + 1 :])
        placed = PlacedStage(
            num_replicas=placement.num_replicas,
            max_in_flight=placement.schedule.max_in_flight,
            forward_ns=f,
            round_trip_before_ns=partial.round_trip_ns,
        )
        return PartialPlan(
            boundaries=(*partial.boundaries, end),
            placements=(
                partial.placements if transitions is None else (*partial.placements, placement.successors[number])
            ),
            first_arrival_ns=_scalar(extended.first_arrival_ns),
            last_arrival_ns=_scalar(extended.last_arrival_ns),
            tail_ns=_scalar(extended.tail_ns),
            backwards_tail_ns=_scalar(extended.backwards_tail_ns),
            forwards_ns=_scalar(extended.forwards_ns),
            send_ns=x,
            grad_ns=y,
            # A child cannot be faster than its parent's bound, so a weaker bound of its own is replaced by that.
            bound_ns=max(partial.bound_ns, _scalar(next_stage.step_ns)),
            round_trip_ns=partial.round_trip_ns + f + r + x + y,
            stages=(*partial.stages, placed),
            work_ns=work_ns,
        )

    def _child_bounds_ns(self, partial: PartialPlan, stage: StageCandidates, transitions: Transitions) -> IntArray:
        """The bounds of the children: prefix, next stage and cost-to-go together. [N * C, ends]"""
        next_stage = self._next_stage.bound(partial, stage, transitions)
        extended = self._next_stage.extend(partial, stage, next_stage, transitions)
        to_go = transitions.cost_to_go
        arrival = extended.first_arrival_ns
        bounds = [
            np.maximum(next_stage.step_ns, partial.bound_ns),
            # Work, return, link, round trip of the stages to come: they are reached, and all is done there, or their
            # last gradients come back and a stage of the prefix finishes.
            arrival + np.maximum(to_go.done, to_go.returned + extended.tail_ns),
        ]
        if LAST_MICROBATCH in self._enabled:
            onward = np.maximum(to_go.last, to_go.round_trip + extended.tail_ns)
            bounds.append(extended.last_arrival_ns + onward)
        if SHARED_DEVICE in self._enabled and partial.work_ns:
            bounds.append(self._bound_shared_device(partial, stage, to_go))
        if self._forwards_first:
            bounds.append(arrival + _bound_forwards_first(extended, to_go))
        return clip_inf(maximum(bounds))

    def _bound_shared_device(self, partial: PartialPlan, stage: StageCandidates, to_go: CostToGo) -> IntArray:
        """Bound "shared device": the work of the next stage's device, and the mean work of all devices."""
        position = partial.placements[-1].position
        assert position is not None
        work = partial.work_ns
        here = work[position] + self.num_microbatches * stage.microbatch_ns
        per_microbatch = np.minimum(stage.microbatch_ns + to_go.total_work, INF // self.num_microbatches)
        # The busiest device has at least the mean of all: the total divided by the number of devices.
        total = sum(work) + self.num_microbatches * per_microbatch
        bound: IntArray = np.maximum(here, total // len(work))
        return bound

    def _root_bound_ns(self, partial: PartialPlan, to_go: CostToGo) -> int:
        """The bound of an empty plan: the cost-to-go from the start of the chain."""
        # [0, 0]: the one sync class of this table, and the start of the chain.
        bound_ns = int(max(to_go.done[0, 0], to_go.returned[0, 0]))
        if SHARED_DEVICE in self._enabled and partial.work_ns:
            total_ns = min(INF, self.num_microbatches * int(to_go.total_work[0, 0]))
            bound_ns = max(bound_ns, total_ns // len(partial.work_ns))
        if self._forwards_first and to_go.round_trip[0, 0] < INF:
            bound_ns = max(bound_ns, int(to_go.backwards_done[0, 0] + to_go.forwards[0, 0]))
        return min(bound_ns, INF)


def _bound_forwards_first(extended: Extension, to_go: CostToGo) -> IntArray:
    """Bound "forwards first", from the first arrival at the stages to come: all F, then only backwards."""
    backwards = maximum(
        [
            to_go.backwards_done,
            to_go.backwards_returned + extended.tail_ns,
            to_go.round_trip + extended.backwards_tail_ns,
        ]
    )
    return backwards + np.maximum(to_go.forwards, extended.forwards_ns)


def _scalar(values: IntArray) -> int:
    return int(values.flat[0])
