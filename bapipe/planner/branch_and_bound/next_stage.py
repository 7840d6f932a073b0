"""Bounds of the stages placed so far and the next one, and what a partial plan extended by that stage says of the step.

The letters and the names of the bounds are those of `lower_bound.py`; docs/algorithm.md proves each of them.
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
    """Bounds of the next stage of a partial plan, with each of n ends and N * C ways to go on. [N * C, n] or [n]

    Attributes:
        alone: the bounds of the stage alone, from its first F on.
        last_start_ns: when it starts F of the last micro-batch.
        step_ns: the step time that the stages up to this one need.
    """

    alone: StageBound
    last_start_ns: IntArray
    step_ns: IntArray


@dataclass(frozen=True, slots=True)
class Extension:
    """A partial plan extended by the next stage: attributes of `PartialPlan`. [N * C, n] or [n]"""

    first_arrival_ns: IntArray
    last_arrival_ns: IntArray
    tail_ns: IntArray
    backwards_tail_ns: IntArray
    forwards_ns: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStageBounds:
    """The bounds of partial plans and their next stages, of one schedule and micro-batch size.

    Attributes:
        forwards_first: whether the bound of that name is used.
        enabled: the bounds to use, by name.
    """

    transfers: CutTransfers
    num_microbatches: int
    forwards_first: bool
    enabled: Set[str]

    def bound(self, partial: PartialPlan, stage: StageCandidates, transitions: Transitions | None) -> NextStage:
        """Returns bounds of the stages up to the next one, for each of its ends and each way to go on."""
        placement, e = partial.placements[-1], stage.finish_ns
        beyond: IntArray | int = 0
        busy_link: IntArray | int = 0
        # From the start of the last F here to the end of the step, if a stage beyond is the last to finish.
        onward: IntArray = stage.forward_ns
        if transitions is not None:
            beyond, busy_link = transitions.beyond_ns, transitions.busy_link_ns
            onward = stage.forward_ns + transitions.send_ns + transitions.cost_to_go.last
        stalls = self._stalls(partial, transitions)
        alone = bound_stage(placement, self.num_microbatches, stage, beyond, busy_link, stalls, self.enabled)
        # L(s): delayed by the order of this stage, by the stages before, or by round trips between both (zigzag).
        last_start = np.maximum(partial.first_arrival_ns + alone.last_start_ns, partial.last_arrival_ns)
        if ZIGZAG in self.enabled:
            here = stage.forward_ns + stage.critical_backward_ns
            for placed in partial.stages:
                last_start = np.maximum(last_start, self._bound_zigzag(partial, placed, here))
        terms = [
            # The last micro-batch goes to the last stage and back; this stage, one before or one beyond finishes.
            (LAST_MICROBATCH, last_start + np.maximum(alone.round_trip_ns + np.maximum(e, partial.tail_ns), onward)),
            # All r here are over, then this stage finishes; or the gradients go back, and a stage before finishes.
            (RETURN, partial.first_arrival_ns + alone.backward_done_ns + e),
            (RETURN, partial.first_arrival_ns + alone.returned_ns + partial.tail_ns),
        ]
        for k, work in alone.replica_done_ns:
            # Replica k waits for micro-batch k: each stage before runs F of the micro-batches before it on a replica.
            fed = max((k // placed.num_replicas * placed.forward_ns for placed in partial.stages), default=0)
            terms.append((WORK, partial.first_arrival_ns + fed + work))
        # Without any enabled bound the round trip of one micro-batch remains.
        step = largest(terms, self.enabled, otherwise=partial.first_arrival_ns + alone.round_trip_ns)
        return NextStage(alone, last_start, clip_inf(step))

    def _stalls(self, partial: PartialPlan, transitions: Transitions | None) -> TransferStalls:
        """How long transfers block the devices of the next stage."""
        if not self.transfers.blocks_on_transfers(partial.placements[-1]):
            return TransferStalls()
        send, recv = (0, 0) if transitions is None else (transitions.send_ns, transitions.grad_ns)
        return TransferStalls(partial.send_ns, partial.grad_ns, send, recv)

    def _bound_zigzag(self, partial: PartialPlan, placed: PlacedStage, here: IntArray) -> IntArray | int:
        """Bound "zigzag": when the last micro-batch reaches the next stage s, by round trips from an earlier stage i.

        One round trip from i to s and back admits the F of d_i - a_s more micro-batches at i. `here` is f + r of s.
        """
        ahead = partial.placements[-1].schedule.forwards_ahead  # a_s
        gain = placed.max_in_flight - ahead
        if gain < 1 or ahead >= self.num_microbatches:
            return 0
        # docs/algorithm.md, Zigzag: gain = g, rounds = k, extra = h, with M - 1 - a = k g + h.
        rounds, extra = divmod(self.num_microbatches - 1 - ahead, gain)
        # Stages i to s - 1 and their transfers, both ways.
        between = partial.round_trip_ns - placed.round_trip_before_ns
        # Clipped so that `rounds` of them stay at most `INF`.
        round_trip = np.minimum(between + here, INF // max(rounds, 1))
        waits = (ahead + extra) // placed.num_replicas * placed.forward_ns
        start: IntArray = partial.first_arrival_ns + waits + rounds * round_trip
        return start

    def extend(
        self, partial: PartialPlan, stage: StageCandidates, next_stage: NextStage, transitions: Transitions | None
    ) -> Extension:
        """Returns what the partial plans extended by the next stage say of the step."""
        f, r = stage.forward_ns, stage.critical_backward_ns
        zero = np.zeros((1, 1), dtype=np.int64)
        x, y = (zero, zero) if transitions is None else (transitions.send_ns, transitions.grad_ns)
        num_earlier = 0 if transitions is None else transitions.num_earlier
        first_arrival = partial.first_arrival_ns + f + x
        # The last micro-batch leaves the stage after its F, and the link after the micro-batches before it.
        last_arrival = np.maximum(next_stage.last_start_ns + f + x, first_arrival + num_earlier * x)
        # The tail: this stage finishes, or its gradient goes back and an earlier stage finishes.
        after = np.maximum(stage.finish_ns, partial.tail_ns)
        forwards = backwards_tail = np.zeros(1, dtype=np.int64)
        if self.forwards_first:
            # q(s) of the bound "forwards first": how many micro-batches this stage, and the link after it, pass on
            # before z.
            num_before = num_before_final(partial.placements[-1], self.num_microbatches)
            num_before_on_link = 0 if transitions is None else transitions.num_before_final
            forwards = np.maximum(np.maximum(num_before * f, num_before_on_link * x), partial.forwards_ns)
            # After the first r of the stage beyond: its gradient comes here, then r and the other r; or all other
            # gradients on the link; or the whole backward work of a replica.
            backwards_tail = y + maximum(
                [
                    r + self._after_first_backward_ns(partial, stage, next_stage),
                    r + num_earlier * y + after,
                    stage.max_backward_work_ns,
                ]
            )
        return Extension(first_arrival, last_arrival, y + r + after, backwards_tail, forwards)

    def _after_first_backward_ns(self, partial: PartialPlan, stage: StageCandidates, next_stage: NextStage) -> IntArray:
        """Bound "forwards first": what must follow the first r of the next stage, as only backwards remain."""
        placement = partial.placements[-1]
        # The other n - 1 micro-batches of a replica; gradients block it if it cannot compute while it sends.
        num_others = -(-self.num_microbatches // placement.num_replicas) - 1
        sends = num_others * partial.grad_ns if self.transfers.blocks_on_transfers(placement) else 0
        others = next_stage.alone.other_backwards_ns
        return maximum(
            [others + stage.finish_ns, others + sends + partial.tail_ns, np.array(partial.backwards_tail_ns)]
        )
