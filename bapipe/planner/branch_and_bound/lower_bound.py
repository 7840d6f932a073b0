"""Admissible lower bounds on the step time of partial plans, in which only the first stages are placed.

Notation, for stage s of a plan (docs/algorithm.md has the proofs):

    f, b    times of F and of the backward of a micro-batch, B or I + W
    r       the part of the backward that must end before the previous stage can begin its own: B, or I if the backward
            is split (0 if the stage sends no gradient back, like the first one: all of B is then in W)
    x, y    transfer times of a micro-batch's activations to stage s + 1 and of its gradients back
    e       what must follow the last r of the stage: W if it is separate, the all-reduces, the update
    M, n    micro-batches of the step, and of one replica
    d       maximum in flight: F of micro-batch m + d follows r of micro-batch m on the same replica
    a       F of micro-batch m + a precedes r of micro-batch m on the same replica

If replicas differ, times are minima over them. On devices that cannot compute while they transfer, f and r also contain
the transfers that must end by then. These are the bounds, by name. A step takes at least as long as

    work              for one replica: the first micro-batch reaches stage s, then all work of the replica, all-reduces
                      and update:
                          sum_{i<s} (f + x) + n (f_s + b_s) + e_s
                      Replica k also waits until the earlier stages have run F of micro-batch k.
    return            for one replica: the first micro-batch reaches stage s, then all F and r of the replica, then the
                      way back to a stage j <= s, which finishes:
                          sum_{i<s} (f + x) + n (f_s + r_s) + max_j (sum_{j<=i<s} (y + r) + e_j)
    link              the same for one direction of a link instead of a replica: one micro-batch goes to the last stage
                      and back, before or after all micro-batches cross the link
    round trip        one micro-batch goes from stage s to the last stage and back; then follow all r of a replica but
                      the first, and the F that the order has after that first r
    last micro-batch  the last micro-batch reaches stage s through all earlier stages, then goes to the last stage and
                      back to any stage j, which finishes. Before its F at a stage i there is time for
                        - the other F of its replica, and the r that the order has before the last F
                        - (M - 1) / d_i round trips from stage i to the last stage, one after another
    zigzag            the same, with round trips from stage i only to stage s before F of the last micro-batch: F of
                      micro-batch m goes from i to s, where r of m - a_s follows; that goes back to i, where F of
                      m - a_s + d_i follows, and so on
    shared device     if devices have several stages: the maximum work of a device, and the mean over all devices
    forwards first    for schedules with all F of a device before its first backward (GPipe): one of the final
                      micro-batches leaves a stage only after k others, sum (f + x) + max (k f, k x). Then only
                      backwards remain: one micro-batch goes back to stage s, the other r follow, then the way back to j

Each bound is computed in two parts: for the placed stages and the next one (`stage_bound.py`, `next_stage.py`), and for
all later stages (`cost_to_go.py`). The bound of a child is the maximum over the bounds that combine both. Every line
that computes a bound names it.
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
    """Computes the bounds for one schedule and micro-batch size, and makes the children of partial plans.

    Attributes:
        costs: the costs of stages.
        num_microbatches: micro-batches of the step.
        cost_to_go: the table without finish classes.
    """

    def __init__(
        self,
        costs: StageCostTable,
        num_microbatches: int,
        *,
        forwards_first: bool,
        finish_limits_ns: Sequence[int] = (),
        enabled: Set[str] = BOUND_NAMES,
        deadline: Deadline = UNLIMITED,
    ) -> None:
        """Makes empty tables.

        Args:
            forwards_first: whether the schedule runs all F of a device before its first backward.
            finish_limits_ns: the ascending thresholds between the finish classes; see `cost_to_go.py`.
            enabled: the bounds to use, by name; lower bounds are no larger with fewer of them.
            deadline: after it, making tables raises OutOfTime.
        """
        self.costs, self.num_microbatches = costs, num_microbatches
        self._forwards_first = forwards_first and FORWARDS_FIRST in enabled
        self._enabled, self._finish_limits_ns, self._deadline = enabled, tuple(finish_limits_ns), deadline
        self._next_stage = NextStageBounds(
            transfers=costs.transfers,
            num_microbatches=num_microbatches,
            forwards_first=self._forwards_first,
            enabled=enabled,
        )
        self._make_tables(None)

    def narrowed(self, rows: Mapping[Hashable, IntArray]) -> "LowerBound":
        """Returns the bounds for plans in which stages may only have some intervals.

        Args:
            rows: the indices of the intervals that a stage on each placement may have, by `sharing_key`.
        """
        other = copy(self)
        other._make_tables(rows)
        return other

    def _make_tables(self, rows: Mapping[Hashable, IntArray] | None) -> None:
        """Makes empty tables of the cost-to-go; `rows` as in `CostToGoTable`."""

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

        # Two tables: `roots` and `extend` need one number per quantity, so theirs has a single finish class. `children`
        # uses several, for larger bounds, and takes the minimum over the classes at the end.
        self.cost_to_go = table(())
        self._cost_to_go_by_class = table(self._finish_limits_ns)

    def roots(
        self, first: tuple[StagePlacement, ...], num_positions: int, known_ns: int = 0
    ) -> Iterator[tuple[int, PartialPlan]]:
        """Yields (bound, plan without placed stages) for each first placement with which some plan may fit.

        Args:
            first: the possible placements of the first stage.
            num_positions: the number of devices if these have several stages, else 0.
            known_ns: a known lower bound on the step time of all these plans.
        """
        for placement in first:
            partial = PartialPlan((0,), (placement,), work_ns=(0,) * num_positions, bound_ns=known_ns)
            bound_ns = max(known_ns, self._root_bound_ns(partial, self.cost_to_go.of(placement)))
            # An infinite cost-to-go proves that no plan with this placement fits.
            if bound_ns < INF:
                yield bound_ns, partial

    def children(self, partial: PartialPlan) -> tuple[IntArray, IntArray, IntArray]:
        """Returns for every child its bound, the end of the next stage, and the index of the successor after it.

        The bound is `INF` if the child does not fit. The index counts in `StagePlacement.successors`; it is -1 if the
        next stage is the last one. All three: [children]
        """
        placement, begin = partial.placements[-1], partial.boundaries[-1]
        stage = self.costs.candidates_from(placement, begin)
        if placement.is_last:
            return self._last_children(partial, stage.select(len(stage.fits) - 1))
        transitions = self._cost_to_go_by_class.transitions(placement)
        if transitions is None:
            none = np.zeros(0, dtype=np.int64)
            return none, none, none
        # All boundaries after `begin`, with those at which the stage does not fit. [ends]
        ends = np.arange(begin + 1, begin + 1 + len(stage.fits))
        num_successors = len(placement.successors)
        bounds = self._child_bounds_ns(partial, stage, transitions.select(slice(None), slice(begin + 1, None)))
        # Each completion is in one of the finish classes, so the minimum over these holds. [N * C, ends] -> [N, ends]
        bounds = bounds.reshape(num_successors, self._cost_to_go_by_class.num_classes, len(ends)).min(axis=1)
        # The children in the order of the flattened array [N, ends]: successor by successor.
        numbers = np.repeat(np.arange(num_successors), len(ends))
        return np.where(stage.fits, bounds, INF).ravel(), np.tile(ends, num_successors), numbers

    def _last_children(self, partial: PartialPlan, stage: StageCandidates) -> tuple[IntArray, IntArray, IntArray]:
        """Returns the only child of a plan whose next stage is the last one, which takes all remaining layers.

        Arrays as in `children`, of one entry.
        """
        next_stage = self._next_stage.bound(partial, stage, None)
        bounds = np.maximum(next_stage.step_ns, partial.bound_ns)
        if self._forwards_first:
            extended = self._next_stage.extend(partial, stage, next_stage, None)
            # Bound "forwards first" for the last stage: the end of all F, then what follows its first r.
            forwards_first_ns = extended.first_arrival_ns + extended.forwards_ns + extended.backwards_tail_ns
            bounds = np.maximum(bounds, forwards_first_ns)
        end = self.costs.intervals.num_boundaries - 1
        return np.where(stage.fits, clip_inf(bounds), INF).ravel(), np.array([end]), np.array([-1])

    def extend(self, partial: PartialPlan, end: int, number: int) -> PartialPlan:
        """Returns the child of a partial plan whose next stage ends at a boundary.

        Args:
            end: the boundary.
            number: the index of the placement after it, as in `children`.
        """
        placement, begin = partial.placements[-1], partial.boundaries[-1]
        # One interval, so all arrays have one entry. The finish class of the completion is not known yet: use the table
        # without finish classes, which holds for every completion.
        stage = self.costs.candidates_from(placement, begin).select(end - begin - 1)
        transitions = None if placement.is_last else self.cost_to_go.transitions(placement)
        if transitions is not None:
            transitions = transitions.select(slice(number, number + 1), slice(end, end + 1))
        next_stage = self._next_stage.bound(partial, stage, transitions)
        extended = self._next_stage.extend(partial, stage, next_stage, transitions)
        f, r = int(stage.forward_ns[0]), int(stage.critical_backward_ns[0])
        x, y = (0, 0) if transitions is None else (int(transitions.send_ns[0, 0]), int(transitions.grad_ns[0, 0]))
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
            # The bound of its parent holds for the child, too.
            bound_ns=max(partial.bound_ns, _scalar(next_stage.step_ns)),
            round_trip_ns=partial.round_trip_ns + f + r + x + y,
            stages=(*partial.stages, placed),
            work_ns=self._add_work(partial.work_ns, placement, stage),
        )

    def _add_work(self, work_ns: tuple[int, ...], placement: StagePlacement, stage: StageCandidates) -> tuple[int, ...]:
        """Returns the work of each device with that of a stage, for the bound "shared device"; () if it is not used."""
        position = placement.position
        if position is None:
            return work_ns
        added_ns = work_ns[position] + self.num_microbatches * int(stage.microbatch_ns[0])
        return (*work_ns[:position], added_ns, *work_ns[position + 1 :])

    def _child_bounds_ns(self, partial: PartialPlan, stage: StageCandidates, transitions: Transitions) -> IntArray:
        """Returns the bounds of the children, from placed stages, next stage and cost-to-go. [N * C, ends]"""
        next_stage = self._next_stage.bound(partial, stage, transitions)
        extended = self._next_stage.extend(partial, stage, next_stage, transitions)
        to_go = transitions.cost_to_go
        arrival = extended.first_arrival_ns
        bounds = [
            np.maximum(next_stage.step_ns, partial.bound_ns),
            # Work, return, link, round trip of the stages to come: the first micro-batch arrives, then they finish, or
            # their last gradients come back and an earlier stage finishes.
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
        """Returns the bound "shared device": the work of the next stage's device, and the mean work of all devices."""
        position = partial.placements[-1].position
        assert position is not None
        work = partial.work_ns
        here = work[position] + self.num_microbatches * stage.microbatch_ns
        per_microbatch = np.minimum(stage.microbatch_ns + to_go.total_work, INF // self.num_microbatches)
        # The busiest device has at least the mean work of all devices.
        total = sum(work) + self.num_microbatches * per_microbatch
        bound: IntArray = np.maximum(here, total // len(work))
        return bound

    def _root_bound_ns(self, partial: PartialPlan, to_go: CostToGo) -> int:
        """Returns the bound of a plan without placed stages: the cost-to-go from the start of the chain."""
        # [0, 0]: the only finish class of this table, at the start of the chain.
        bound_ns = int(max(to_go.done[0, 0], to_go.returned[0, 0]))
        if SHARED_DEVICE in self._enabled and partial.work_ns:
            total_ns = min(INF, self.num_microbatches * int(to_go.total_work[0, 0]))
            bound_ns = max(bound_ns, total_ns // len(partial.work_ns))
        if self._forwards_first and to_go.round_trip[0, 0] < INF:
            bound_ns = max(bound_ns, int(to_go.backwards_done[0, 0] + to_go.forwards[0, 0]))
        return min(bound_ns, INF)


def _bound_forwards_first(extended: Extension, to_go: CostToGo) -> IntArray:
    """Returns the bound "forwards first" from the first arrival at the stages to come: all F, then only backwards."""
    backwards = maximum(
        [
            to_go.backwards_done,
            to_go.backwards_returned + extended.tail_ns,
            to_go.round_trip + extended.backwards_tail_ns,
        ]
    )
    return backwards + np.maximum(to_go.forwards, extended.forwards_ns)


def _scalar(values: IntArray) -> int:
    """Returns the value of an array of one entry."""
    return int(values.flat[0])
