"""Bounds for the placed stages and the next one, and the quantities of the partial plan extended by the next stage.

The letters and the names of the bounds are those of `lower_bound.py`; the proofs are in docs/algorithm.md. Shapes: n
ends of the next stage, N successors of its placement, C finish classes.
"""

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from bapipe.planner.branch_and_bound.cost_to_go import Transitions, num_before_final
from bapipe.planner.branch_and_bound.partial_plan import PartialPlan, PlacedStage
from bapipe.planner.branch_and_bound.stage_bound import (
    LAST_MICROBATCH,
    RETURN,
    WORK,
    ZIGZAG,
    StageBound,
    TransferStalls,
    bound_stage,
    clip_inf,
    largest,
    maximum,
)
from bapipe.planner.stages.cut_transfers import CutTransfers
from bapipe.planner.stages.intervals import INF, IntArray
from bapipe.planner.stages.stage_candidates import StageCandidates


@dataclass(frozen=True, slots=True)
class NextStage:
    """Lower bounds for the next stage of a partial plan, for each end and each row of `Transitions`. [N * C, n] or [n]

    Attributes:
        alone: the bounds for the stage by itself, from the start of its first F.
        last_start_ns: when it starts F of the last micro-batch.
        step_ns: the step time, from the placed stages and this one.
    """

    alone: StageBound
    last_start_ns: IntArray
    step_ns: IntArray


@dataclass(frozen=True, slots=True)
class Extension:
    """Attributes of the `PartialPlan` that is extended by the next stage. [N * C, n] or [n]"""

    first_arrival_ns: IntArray
    last_arrival_ns: IntArray
    tail_ns: IntArray
    backwards_tail_ns: IntArray
    forwards_ns: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStageBounds:
    """Computes the bounds for partial plans and their next stages, for one schedule and micro-batch size.

    Attributes:
        transfers: the transfers between stages.
        num_microbatches: micro-batches of the step.
        forwards_first: whether the bound of that name is used.
        enabled: the bounds to use, by name.
    """

    transfers: CutTransfers
    num_microbatches: int
    forwards_first: bool
    enabled: Set[str]

    def bound(self, partial: PartialPlan, stage: StageCandidates, transitions: Transitions | None) -> NextStage:
        """Returns the bounds for the placed stages and the next one.

        Args:
            stage: the next stage with each end. [n]
            transitions: from its placement to each successor, at each end; None if it is the last stage. [N * C, n]
        """
        placement, e = partial.placements[-1], stage.finish_ns
        beyond: IntArray | int = 0
        busy_link: IntArray | int = 0
        # From the start of the last F here to the end of the step, if a later stage finishes last.
        onward: IntArray = stage.forward_ns
        if transitions is not None:
            beyond, busy_link = transitions.beyond_ns, transitions.busy_link_ns
            onward = stage.forward_ns + transitions.send_ns + transitions.cost_to_go.last
        stalls = self._stalls(partial, transitions)
        alone = bound_stage(placement, self.num_microbatches, stage, beyond, busy_link, stalls, self.enabled)
        # L(s): from the order of this stage, from the placed stages, or from round trips between both (zigzag).
        last_start = np.maximum(partial.first_arrival_ns + alone.last_start_ns, partial.last_arrival_ns)
        if ZIGZAG in self.enabled:
            here = stage.forward_ns + stage.critical_backward_ns
            for placed in partial.stages:
                last_start = np.maximum(last_start, self._bound_zigzag(partial, placed, here))
        terms = [
            # The last micro-batch goes to the last stage and back; then this, an earlier or a later stage finishes.
            (LAST_MICROBATCH, last_start + np.maximum(alone.round_trip_ns + np.maximum(e, partial.tail_ns), onward)),
            # After the last r here this stage finishes; or its gradient goes back and an earlier stage finishes.
            (RETURN, partial.first_arrival_ns + alone.backward_done_ns + e),
            (RETURN, partial.first_arrival_ns + alone.returned_ns + partial.tail_ns),
        ]
        for k, work in alone.replica_done_ns:
            # Replica k waits for micro-batch k, before which replicas of earlier stages run F of others.
            wait_ns = max((k // placed.num_replicas * placed.forward_ns for placed in partial.stages), default=0)
            terms.append((WORK, partial.first_arrival_ns + wait_ns + work))
        # Without any enabled bound, the round trip of one micro-batch.
        step = largest(terms, self.enabled, otherwise=partial.first_arrival_ns + alone.round_trip_ns)
        return NextStage(alone, last_start, clip_inf(step))

    def _stalls(self, partial: PartialPlan, transitions: Transitions | None) -> TransferStalls:
        """Returns how long transfers block the devices of the next stage."""
        if not self.transfers.blocks_on_transfers(partial.placements[-1]):
            return TransferStalls()
        send, recv = (0, 0) if transitions is None else (transitions.send_ns, transitions.grad_ns)
        return TransferStalls(partial.send_ns, partial.grad_ns, send, recv)

    def _bound_zigzag(self, partial: PartialPlan, placed: PlacedStage, here: IntArray) -> IntArray | int:
        """Returns L(s) of the bound "zigzag" for the next stage s: from round trips between it and a placed stage i.

        One round trip from i to s and back allows F of d_i - a_s more micro-batches at i. 0 if there are none.

        Args:
            placed: stage i.
            here: f + r of stage s.
        """
        ahead = partial.placements[-1].schedule.forwards_ahead  # a_s
        gain = placed.max_in_flight - ahead
        if gain < 1 or ahead >= self.num_microbatches:
            return 0
        # In docs/algorithm.md, "Zigzag": gain = g, rounds = k, extra = h, with M - 1 - a = k g + h.
        rounds, extra = divmod(self.num_microbatches - 1 - ahead, gain)
        # Stages i to s - 1 and their transfers, both ways.
        between = partial.round_trip_ns - placed.round_trip_before_ns
        # Clipped so that `rounds` times this is at most `INF`.
        round_trip = np.minimum(between + here, INF // max(rounds, 1))
        waits = (ahead + extra) // placed.num_replicas * placed.forward_ns
        start: IntArray = partial.first_arrival_ns + waits + rounds * round_trip
        return start

    def extend(
        self, partial: PartialPlan, stage: StageCandidates, next_stage: NextStage, transitions: Transitions | None
    ) -> Extension:
        """Returns the quantities of the partial plans extended by the next stage; arguments as in `bound`."""
        f, r = stage.forward_ns, stage.critical_backward_ns
        zero = np.zeros((1, 1), dtype=np.int64)
        x, y = (zero, zero) if transitions is None else (transitions.send_ns, transitions.grad_ns)
        num_earlier = 0 if transitions is None else transitions.num_earlier
        first_arrival = partial.first_arrival_ns + f + x
        # The last micro-batch arrives after its F, and after the micro-batches before it have crossed its link.
        last_arrival = np.maximum(next_stage.last_start_ns + f + x, first_arrival + num_earlier * x)
        # After the last r here, this stage finishes, or its gradient goes back and an earlier stage finishes.
        after = np.maximum(stage.finish_ns, partial.tail_ns)
        forwards = backwards_tail = np.zeros(1, dtype=np.int64)
        if self.forwards_first:
            # q(s) of the bound "forwards first": how many micro-batches pass this stage, and the link after it, before
            # a final one.
            num_before = num_before_final(partial.placements[-1], self.num_microbatches)
            num_before_on_link = 0 if transitions is None else transitions.num_before_final
            forwards = np.maximum(np.maximum(num_before * f, num_before_on_link * x), partial.forwards_ns)
            # After the first r of the stage after this one, its gradient comes here. Then follow all r here, or the
            # other gradients on the link, or the whole backward work of a replica.
            backwards_tail = y + maximum(
                [
                    r + self._after_first_backward_ns(partial, stage, next_stage),
                    r + num_earlier * y + after,
                    stage.max_backward_work_ns,
                ]
            )
        return Extension(first_arrival, last_arrival, y + r + after, backwards_tail, forwards)

    def _after_first_backward_ns(self, partial: PartialPlan, stage: StageCandidates, next_stage: NextStage) -> IntArray:
        """Returns what must follow the first r of the next stage if only backwards remain (bound "forwards first")."""
        placement = partial.placements[-1]
        # The other n - 1 micro-batches of a replica, whose gradients block it if it cannot compute while it sends.
        num_others = -(-self.num_microbatches // placement.num_replicas) - 1
        sends = num_others * partial.grad_ns if self.transfers.blocks_on_transfers(placement) else 0
        others = next_stage.alone.other_backwards_ns
        return maximum(
            [others + stage.finish_ns, others + sends + partial.tail_ns, np.array(partial.backwards_tail_ns)]
        )
