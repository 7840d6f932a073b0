"""Admissible cost-to-go: a lower bound on what all stages still to come add to the step, wherever they are cut.

A backward dynamic programme over placements (last to first) and boundaries. For a placement p and a boundary i it gives
lower bounds for a stage on p that begins at i together with all later stages: minima over the end j of the stage and
the placement of the next one. Each of the eight quantities of `CostToGo` has a minimum of its own, attained by cuts and
placements of its own. That is a relaxation, so combining them never exceeds the cost of any completion.

Finish classes. If the last micro-batch is to return soon, stages must have little to do after it (a small e). If each
device is to have little work, there must be replicas, whose all-reduces make e large. Minima of their own would assume
both at once. So completions are divided into classes by their largest e, at the thresholds `finish_limits_ns`. Each
quantity is minimized within a class, and a bound is the minimum over the classes of the maximum of its terms. The
notation and the names of the bounds are those of `lower_bound.py`.

Shapes: C finish classes, N successors of a placement, B = K + 1 boundaries.
"""

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bapipe.planner.branch_and_bound.stage_bound import (
    LAST_MICROBATCH,
    RETURN,
    WORK,
    StageBound,
    TransferStalls,
    bound_stage,
    clip_inf,
    largest,
    maximum,
)
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.stages.intervals import INF, BoolArray, IntArray, SomeIntervals
from bapipe.planner.stages.placements import StagePlacement, in_postorder
from bapipe.planner.stages.stage_candidates import StageCandidates, StageCostTable

UNUSED = np.zeros(0, dtype=np.int64)
"""Stands for quantities that the current schedule does not need."""


class CostToGo(NamedTuple):
    """Lower bounds for a stage on a placement and all later stages, in ns from the start of its first F. All [C, B].

    Attributes:
        round_trip: one micro-batch to the last stage and back, with its F and r here.
        last: from the start of the last F here until the updates that must follow its way back are done.
        done: until all updates are done.
        returned: until the last r here is over and all gradients but the last have been sent back.
        total_work: F and B of one micro-batch, summed over the stages; 0 unless devices have several stages.
        forwards: for forwards-first schedules, how much later one of the final micro-batches reaches the last stage
            than the first one does.
        backwards_done, backwards_returned: for these schedules, `done` and `returned` if only backwards remain.
    """

    round_trip: IntArray
    last: IntArray
    done: IntArray
    returned: IntArray
    total_work: IntArray
    forwards: IntArray
    backwards_done: IntArray
    backwards_returned: IntArray


@dataclass(frozen=True, slots=True)
class Transitions:
    """The steps from a placement to each of its successors, at every boundary. A row per successor and finish class.

    Attributes:
        send_ns, grad_ns: x and y, transfers of one micro-batch to the next stage and back. [N * C, B]
        busy_send_ns, busy_grad_ns: all micro-batches that cross the busiest link, to the next stage and back.
            [N * C, B]
        num_earlier: how many micro-batches cross the last micro-batch's link before it. [N * C, 1]
        num_before_final: how many cross a link before one of the final micro-batches; these are the last ones, as
            many as the last stage has replicas. [N * C, 1]
        cost_to_go: that of the successors. [N * C, B]
    """

    send_ns: IntArray
    grad_ns: IntArray
    busy_send_ns: IntArray
    busy_grad_ns: IntArray
    num_earlier: IntArray
    num_before_final: IntArray
    cost_to_go: CostToGo

    @property
    def beyond_ns(self) -> IntArray:
        """The time of one micro-batch from the end of its F here until its gradients are back. [N * C, B]"""
        return self.send_ns + self.grad_ns + self.cost_to_go.round_trip

    @property
    def busy_link_ns(self) -> IntArray:
        """The same, if all micro-batches on the busiest link must cross it in one direction. [N * C, B]"""
        one_way = np.maximum(self.busy_send_ns + self.grad_ns, self.send_ns + self.busy_grad_ns)
        busy_link_ns: IntArray = self.cost_to_go.round_trip + one_way
        return busy_link_ns

    def select(self, rows: slice, boundaries: slice) -> "Transitions":
        """Returns some rows, at some boundaries."""
        part = (rows, boundaries)
        return Transitions(
            self.send_ns[part],
            self.grad_ns[part],
            self.busy_send_ns[part],
            self.busy_grad_ns[part],
            self.num_earlier[rows],
            self.num_before_final[rows],
            CostToGo(*(values[part] for values in self.cost_to_go)),
        )


class CostToGoTable:
    """The cost-to-go for one schedule and micro-batch size, computed when first needed.

    Takes O(C * K**2 + N * C * K) time for each placement.
    """

    def __init__(
        self,
        costs: StageCostTable,
        num_microbatches: int,
        finish_limits_ns: Sequence[int],
        *,
        forwards_first: bool,
        enabled: Set[str],
        deadline: Deadline,
        rows: Mapping[Hashable, IntArray] | None = None,
    ) -> None:
        """Makes an empty table.

        Args:
            num_microbatches: micro-batches of the step.
            finish_limits_ns: the ascending thresholds of e between the finish classes.
            forwards_first: whether the bound of that name is used.
            enabled: the bounds to use, by name.
            deadline: after it, the first use of a placement raises OutOfTime.
            rows: the indices of the intervals that a stage on each placement may have, by `sharing_key`; None if it may
                have any.
        """
        self._deadline = deadline
        self.costs, self.num_microbatches, self.forwards_first = costs, num_microbatches, forwards_first
        self.enabled, self._rows = enabled, rows
        self._finish_limits_ns = np.array(finish_limits_ns, dtype=np.int64)
        self.num_classes = len(finish_limits_ns) + 1
        self._cost_to_go: dict[Hashable, CostToGo] = {}
        self._transitions: dict[StagePlacement, Transitions | None] = {}

    def of(self, placement: StagePlacement) -> CostToGo:
        """Returns the cost-to-go of a placement, the same object for equal `sharing_key`. Arrays are [C, B]."""
        for other in in_postorder([placement], lambda each: sharing_key(each) in self._cost_to_go):
            self._deadline.check()
            self._cost_to_go[sharing_key(other)] = self._compute(other)
        return self._cost_to_go[sharing_key(placement)]

    def transitions(self, placement: StagePlacement) -> Transitions | None:
        """Returns the transitions from a placement to its successors; None if it has none."""
        if placement not in self._transitions:
            self._transitions[placement] = self._compute_transitions(placement)
        return self._transitions[placement]

    def _compute_transitions(self, placement: StagePlacement) -> Transitions | None:
        """Returns the transitions from a placement, for which the cost-to-go of its successors is computed."""
        successors = placement.successors
        if not successors:
            return None
        # Per successor: one micro-batch, and all micro-batches on the busiest link. [N][2][B]
        sends = [self.costs.transfers.between(placement, successor, forward=True) for successor in successors]
        grads = [self.costs.transfers.between(placement, successor, forward=False) for successor in successors]
        # Micro-batch m crosses link m mod lcm(R, R').
        num_links = [int(np.lcm(placement.num_replicas, successor.num_replicas)) for successor in successors]
        num_not_final = max(0, self.num_microbatches - _num_final(placement))

        def per_class(values: Sequence[object]) -> IntArray:
            """Returns a row per successor and finish class."""
            return np.repeat(np.array(values), self.num_classes, axis=0)

        return Transitions(
            send_ns=per_class([one for one, _ in sends]),
            grad_ns=per_class([one for one, _ in grads]),
            busy_send_ns=per_class([every for _, every in sends]),
            busy_grad_ns=per_class([every for _, every in grads]),
            num_earlier=per_class([[(self.num_microbatches - 1) // count] for count in num_links]),
            num_before_final=per_class([[num_not_final // count] for count in num_links]),
            # Concatenates the tables of the successors: N tables of [C, B] become [N * C, B].
            cost_to_go=CostToGo(*map(np.concatenate, zip(*map(self.of, successors), strict=True))),
        )

    def _compute(self, placement: StagePlacement) -> CostToGo:
        """Returns the cost-to-go of a placement, from that of its successors."""
        intervals = self._intervals(placement)
        transitions = self.transitions(placement) if len(intervals.begins) else None
        # There is no completion if no interval is possible, or too few devices remain.
        if not len(intervals.begins) or (transitions is None and not placement.is_last):
            infinite = np.full((self.num_classes, self.costs.intervals.num_boundaries), INF, dtype=np.int64)
            return CostToGo(*[infinite] * len(CostToGo._fields))
        stage = self.costs.candidates(placement, intervals.rows)  # [intervals]
        following = self._following(placement, transitions)  # [C, B]
        own_class = np.searchsorted(self._finish_limits_ns, stage.finish_ns)  # the class of this stage's e. [intervals]
        by_class = [_with_lower_classes(values) for values in following]  # [2C * B] each
        # For each finish class, a minimum over the completions whose largest e, with this stage's, is in the class.
        rows = []
        for finish_class in range(self.num_classes):
            # Index into `by_class`. If this stage's e is in the class, the stages after it may be in it or in any lower
            # class; else they must be in it, so that the largest e of all is. [intervals]
            row = np.where(own_class == finish_class, self.num_classes + finish_class, finish_class)
            index = row * intervals.num_boundaries + intervals.ends
            at_ends = _Following(*(values[index] if len(values) else UNUSED for values in by_class))
            rows.append(self._minimize(placement, intervals, stage, at_ends, own_class <= finish_class))
        return CostToGo(*map(np.stack, zip(*rows, strict=True)))

    def _intervals(self, placement: StagePlacement) -> SomeIntervals:
        """Returns the intervals that a stage on a placement may have."""
        intervals = self.costs.intervals
        return intervals.every if self._rows is None else intervals.some(self._rows.get(sharing_key(placement), UNUSED))

    def _minimize(
        self,
        placement: StagePlacement,
        intervals: SomeIntervals,
        stage: StageCandidates,
        following: "_Following",
        in_class: BoolArray,
    ) -> CostToGo:
        """Returns the cost-to-go in one finish class: for each begin the minimum over the ends. All [B].

        Args:
            stage: the costs of this stage. [intervals]
            following: what follows it in this finish class. [intervals]
            in_class: whether the e of this stage is in the class or a lower one. [intervals]
        """
        f, r, e = stage.forward_ns, stage.critical_backward_ns, stage.finish_ns
        # Time starts at the first F of this stage: A(s) = 0 in all bounds.
        alone = self._bound_alone(placement, intervals, stage, following)
        # Infinite for intervals that do not fit, have an e of a higher class, or cannot be followed by stages that fit.
        # All values are non-negative, so the maximum with this replaces a value by infinity, faster than `np.where`.
        infeasible = np.where(stage.fits & in_class & (following.beyond < INF), 0, INF)
        # The last r of this stage: after its own work, or after the last gradient from the next stage.
        backward_done = np.maximum(alone.backward_done_ns, f + r + following.returned)
        # `following` starts at the end of F here, this stage at its start: hence f.
        last = f + following.last
        done = largest(
            [
                (RETURN, backward_done + e),
                (LAST_MICROBATCH, alone.last_start_ns + last),
                *((WORK, work) for _, work in alone.replica_done_ns),
            ],
            self.enabled,
            otherwise=f + following.done,
        )

        def minimum(values: IntArray) -> IntArray:
            return clip_inf(intervals.min_per_begin(np.maximum(values, infeasible)))

        zeros = np.zeros(intervals.num_boundaries, dtype=np.int64)
        forwards, backwards_done, backwards_returned = zeros, zeros, zeros
        if self.forwards_first:
            forwards, backwards_done, backwards_returned = map(
                minimum, self._forwards_first(placement, stage, alone, following)
            )
        return CostToGo(
            round_trip=minimum(alone.round_trip_ns),
            last=minimum(np.maximum(alone.round_trip_ns + e, last)),
            done=minimum(np.maximum(done, f + following.done)),
            returned=minimum(np.maximum(alone.returned_ns, backward_done)),
            total_work=zeros if placement.position is None else minimum(stage.microbatch_ns + following.total_work),
            forwards=forwards,
            backwards_done=backwards_done,
            backwards_returned=backwards_returned,
        )

    def _bound_alone(
        self, placement: StagePlacement, intervals: SomeIntervals, stage: StageCandidates, following: "_Following"
    ) -> StageBound:
        """Returns the bounds for this stage by itself, given what follows it. All [intervals]"""
        return bound_stage(
            placement,
            self.num_microbatches,
            stage,
            following.beyond,
            following.busy_link,
            self._stalls(placement, intervals, following),
            self.enabled,
        )

    def _forwards_first(
        self, placement: StagePlacement, stage: StageCandidates, alone: StageBound, following: "_Following"
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Returns `forwards`, `backwards_done` and `backwards_returned` of `CostToGo`. All [intervals]"""
        f, r, e = stage.forward_ns, stage.critical_backward_ns, stage.finish_ns
        # Bound "forwards first" (docs/algorithm.md): U contains the maximum over the stages of q(s) f(s).
        forwards = np.maximum(num_before_final(placement, self.num_microbatches) * f, following.forwards)
        # The first r here comes after the way back from the last stage, then n - 1 more; or r comes after the last
        # gradient from the next stage.
        returned = np.maximum(alone.round_trip_ns + alone.other_backwards_ns, f + r + following.backwards_returned)
        done = maximum(
            [returned + e, alone.round_trip_ns - r + stage.max_backward_work_ns, f + following.backwards_done]
        )
        return forwards, done, returned

    def _stalls(self, placement: StagePlacement, intervals: SomeIntervals, following: "_Following") -> TransferStalls:
        """Returns lower bounds on how long transfers block the devices, for any previous and next stage. [intervals]"""
        if not self.costs.transfers.blocks_on_transfers(placement):
            return TransferStalls()
        begins = intervals.begins
        recv_activation = self.costs.transfers.min_entry_ns(placement, forward=True)
        send_gradient = self.costs.transfers.min_entry_ns(placement, forward=False)
        return TransferStalls(recv_activation[begins], send_gradient[begins], following.send_ns, following.grad_ns)

    def _following(self, placement: StagePlacement, transitions: Transitions | None) -> "_Following":
        """Returns what follows a stage on a placement: minima over the successors. All [C, B], or `UNUSED`."""
        forwards_first, blocks = self.forwards_first, self.costs.transfers.blocks_on_transfers(placement)
        is_multi_stage = placement.position is not None
        if transitions is None:  # the last stage ends at the last boundary; with no e after it, in the lowest class
            end = np.full((self.num_classes, self.costs.intervals.num_boundaries), INF, dtype=np.int64)
            end[0, -1] = 0
            return _Following(
                *[end] * 5,
                *[end if is_multi_stage else UNUSED],
                *[end if forwards_first else UNUSED] * 3,
                *[end if blocks else UNUSED] * 2,
            )
        after, x, y = transitions.cost_to_go, transitions.send_ns, transitions.grad_ns

        def minimum(values: IntArray) -> IntArray:
            """Returns the minimum over the successors. [N * C, B] -> [C, B]"""
            return clip_inf(np.minimum.reduce(values.reshape(-1, self.num_classes, values.shape[-1])))

        forwards = backwards_done = backwards_returned = UNUSED
        if forwards_first:
            forwards = minimum(np.maximum(transitions.num_before_final * x, after.forwards))
            backwards_done = minimum(x + after.backwards_done)
            busy_back = after.round_trip + transitions.num_earlier * y
            backwards_returned = minimum(x + y + np.maximum(after.backwards_returned, busy_back))
        return _Following(
            beyond=minimum(transitions.beyond_ns),
            last=minimum(x + after.last),
            done=minimum(x + after.done),
            returned=minimum(x + y + after.returned),
            busy_link=minimum(transitions.busy_link_ns),
            total_work=minimum(after.total_work) if is_multi_stage else UNUSED,
            forwards=forwards,
            backwards_done=backwards_done,
            backwards_returned=backwards_returned,
            send_ns=minimum(x) if blocks else UNUSED,
            grad_ns=minimum(y) if blocks else UNUSED,
        )


def num_before_final(placement: StagePlacement, num_microbatches: int) -> int:
    """Returns q(s) of the bound "forwards first": how many F a replica runs, at least, before a final one.

    The final micro-batches are the last ones, as many as the last stage can have replicas.
    """
    return max(0, (num_microbatches - _num_final(placement)) // placement.num_replicas)


def _num_final(placement: StagePlacement) -> int:
    """Returns the maximum number of replicas that the last stage can have after this placement."""
    return placement.num_replicas if placement.is_last else placement.max_last_replicas


def _with_lower_classes(values: IntArray) -> IntArray:
    """Returns the values of each finish class, then their minima over it and all lower classes. [C, B] -> [2C * B]"""
    return np.concatenate([values, np.minimum.accumulate(values)]).ravel() if len(values) else UNUSED


class _Following(NamedTuple):
    """The `CostToGo` after a stage, from the end of its F on: minima over the successors. [C, B] or [intervals]

    The attributes are those of `CostToGo`, with x and, if they wait for gradients from the next stage, y added.

    Attributes:
        beyond: `Transitions.beyond_ns`: x, the round trip beyond, y.
        busy_link: `Transitions.busy_link_ns`.
        send_ns, grad_ns: x and y.
    """

    beyond: IntArray
    last: IntArray
    done: IntArray
    returned: IntArray
    busy_link: IntArray
    total_work: IntArray
    forwards: IntArray
    backwards_done: IntArray
    backwards_returned: IntArray
    send_ns: IntArray
    grad_ns: IntArray


def sharing_key(placement: StagePlacement) -> Hashable:
    """Returns a key that is equal for placements known to have equal cost-to-go."""
    return placement if placement.symmetry_key is None else placement.symmetry_key
