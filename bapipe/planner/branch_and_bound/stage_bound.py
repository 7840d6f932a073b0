"""Lower bounds for one stage with each of many layer intervals, in ns from the start of its first F.

The letters and the names of the bounds are those of `lower_bound.py`; the proofs are in docs/algorithm.md.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import reduce

import numpy as np

from bapipe.planner.stages.intervals import INF, IntArray
from bapipe.planner.stages.placements import StagePlacement
from bapipe.planner.stages.stage_candidates import StageCandidates

WORK = "work"
RETURN = "return"
LINK = "link"
ROUND_TRIP = "round trip"
LAST_MICROBATCH = "last micro-batch"
ZIGZAG = "zigzag"
SHARED_DEVICE = "shared device"
FORWARDS_FIRST = "forwards first"

BOUND_NAMES = frozenset({WORK, RETURN, LINK, ROUND_TRIP, LAST_MICROBATCH, ZIGZAG, SHARED_DEVICE, FORWARDS_FIRST})
"""The names of all bounds; see `lower_bound.py`. Without some of them the search remains exact, but is slower."""


@dataclass(frozen=True, slots=True)
class TransferStalls:
    """How long each transfer of a micro-batch blocks a device of a stage; 0 if it can compute meanwhile.

    Arrays broadcast with those of the stage's intervals.

    Attributes:
        recv_activation_ns, send_gradient_ns: transfers from the previous stage, and back to it.
        send_activation_ns, recv_gradient_ns: transfers to the next stage, and back from it.
    """

    recv_activation_ns: IntArray | int = 0
    send_gradient_ns: IntArray | int = 0
    send_activation_ns: IntArray | int = 0
    recv_gradient_ns: IntArray | int = 0

    @property
    def next_stage_ns(self) -> IntArray | int:
        """Both transfers of a micro-batch between this stage and the next one."""
        return self.send_activation_ns + self.recv_gradient_ns


@dataclass(frozen=True, slots=True)
class StageBound:
    """Lower bounds for one stage, in ns from the start of its first F.

    Arrays have the shape of those in `StageCandidates`, broadcast with that of the arguments about later stages.

    Attributes:
        round_trip_ns: one micro-batch to the last stage and back, with its F and r here.
        last_start_ns: until F of the last micro-batch starts.
        backward_done_ns: until the last r ends.
        returned_ns: until the last r ends and, if sending blocks the device, all gradients but the last are sent.
        other_backwards_ns: the time of all r of a replica but its first.
        replica_done_ns: for each distinct replica, (index, until its update is done).
    """

    round_trip_ns: IntArray
    last_start_ns: IntArray
    backward_done_ns: IntArray
    returned_ns: IntArray
    other_backwards_ns: IntArray
    replica_done_ns: tuple[tuple[int, IntArray], ...]


def bound_stage(
    placement: StagePlacement,
    num_microbatches: int,
    stage: StageCandidates,
    beyond_ns: IntArray | int,
    busy_link_ns: IntArray | int,
    stalls: TransferStalls,
    enabled: Set[str],
) -> StageBound:
    """Returns the bounds for a stage with each of some intervals.

    Args:
        num_microbatches: micro-batches of the step.
        beyond_ns: the time of one micro-batch from the end of its F here until its gradients are back: both transfers
            and the round trip from the next stage on. 0 for the last stage.
        busy_link_ns: the same, if all micro-batches on the busiest link must cross it in one direction.
        stalls: how long transfers block the devices of the stage.
        enabled: the bounds to use, by name.
    """
    f, r = stage.forward_ns, stage.critical_backward_ns
    depth = placement.schedule.max_in_flight
    # n of the replica that runs the last micro-batch, the maximum over the replicas.
    per_replica = -(-num_microbatches // placement.num_replicas)
    # How many F of a replica must follow its first r, because at most `depth` micro-batches may be in flight.
    late_forwards = max(0, per_replica - depth // placement.num_replicas)
    round_trip = f + r + beyond_ns
    others = (per_replica - 1) * (r + stalls.recv_gradient_ns)
    # How long transfers block each distinct replica. The first activation is received before the first F.
    blocked = [
        count * stalls.next_stage_ns + (count - 1) * stalls.recv_activation_ns for count, _ in stage.replica_critical_ns
    ]
    critical = [work + extra for (_, work), extra in zip(stage.replica_critical_ns, blocked, strict=True)]
    last_start = _last_start_ns(placement, num_microbatches, stage, round_trip, late_forwards, stalls)
    backward_done = largest(
        [
            (LAST_MICROBATCH, last_start + round_trip),
            (LINK, f + r + busy_link_ns),
            (ROUND_TRIP, round_trip + late_forwards * (f + stalls.send_activation_ns) + others),
            *((RETURN, work) for work in critical),
        ],
        enabled,
        otherwise=f + r,
    )
    # Bound "return" if sending blocks the device: n - 1 gradients are sent before the last one.
    returned = largest(
        [
            (RETURN, work + (count - 1) * stalls.send_gradient_ns)
            for work, (count, _) in zip(critical, stage.replica_critical_ns, strict=True)
        ],
        enabled,
        otherwise=backward_done,
    )
    return StageBound(
        round_trip_ns=round_trip,
        last_start_ns=last_start,
        backward_done_ns=backward_done,
        returned_ns=np.maximum(backward_done, returned),
        other_backwards_ns=others,
        replica_done_ns=tuple(
            (k, work + extra) for (k, work), extra in zip(stage.replica_work_ns, blocked, strict=True)
        ),
    )


def _last_start_ns(
    placement: StagePlacement,
    num_microbatches: int,
    stage: StageCandidates,
    round_trip: IntArray,
    late_forwards: int,
    stalls: TransferStalls,
) -> IntArray:
    """Returns L(s) of the bound "last micro-batch" from one stage: when F of the last micro-batch starts.

    Args:
        late_forwards: how many F of a replica must follow its first r.
    """
    f, r = stage.forward_ns, stage.critical_backward_ns
    num_replicas, depth = placement.num_replicas, placement.schedule.max_in_flight
    per_replica = -(-num_microbatches // num_replicas)
    # Before the last F, the replica has run its other F, and the r that its order puts before it.
    start: IntArray = (per_replica - 1) * (f + stalls.recv_activation_ns) + late_forwards * (r + stalls.next_stage_ns)
    if late_forwards:
        # The first r ends after a round trip; the other r before the last F, and the F between them, follow.
        start = np.maximum(start, round_trip + (late_forwards - 1) * (f + r))
    # Every depth-th micro-batch, counted back from the last one, makes its round trip before the next of these starts
    # (docs/algorithm.md, "Last micro-batch", third item).
    rounds, extra = divmod(num_microbatches - 1, depth)
    if rounds:
        start = np.maximum(start, rounds * np.minimum(round_trip, INF // rounds) + extra // num_replicas * f)
    return start


def largest(terms: Iterable[tuple[str, IntArray]], enabled: Set[str], otherwise: IntArray) -> IntArray:
    """Returns the element-wise maximum of the terms (bound, values) of enabled bounds; `otherwise` without any."""
    return maximum([values for name, values in terms if name in enabled] or [otherwise])


def maximum(values: Iterable[IntArray]) -> IntArray:
    """Returns the element-wise maximum of arrays that broadcast together."""
    return reduce(np.maximum, values)


def clip_inf(values: IntArray) -> IntArray:
    """Returns the values, at most `INF`, so that sums with infinities remain infinity."""
    clipped: IntArray = np.minimum(values, INF)
    return clipped
