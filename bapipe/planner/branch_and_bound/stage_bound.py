"""Lower bounds of one stage, vectorized over layer intervals, counted from the start of its first F.

The letters and the names of the bounds are those of `lower_bound.py`; docs/algorithm.md proves each of them.
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
"""The bounds by name; see `lower_bound.py`. Each can be left out, which keeps the search exact but makes it slower."""


@dataclass(frozen=True, slots=True)
class TransferStalls:
    """How long each transfer of a micro-batch blocks a device that cannot compute meanwhile; 0 if it can.

    Arrays have the shape of what they are added to, or broadcast to it.

    Attributes:
        recv_activation_ns, send_gradient_ns: from the stage before, and back to it.
        send_activation_ns, recv_gradient_ns: to the next stage, and from there.
    """

    recv_activation_ns: IntArray | int = 0
    send_gradient_ns: IntArray | int = 0
    send_activation_ns: IntArray | int = 0
    recv_gradient_ns: IntArray | int = 0

    @property
    def next_stage_ns(self) -> IntArray | int:
        """Both transfers of a micro-batch between this stage and the next."""
        return self.send_activation_ns + self.recv_gradient_ns


@dataclass(frozen=True, slots=True)
class StageBound:
    """Lower bounds of one stage, counted from the start of its first F.

    Arrays have the shape of `StageCandidates`, broadcast with that of what follows the stage.

    Attributes:
        round_trip_ns: one micro-batch from here to the last stage and back, its backward here included.
        last_start_ns: until F of the last micro-batch starts.
        backward_done_ns: until the last r is done.
        returned_ns: the same, and until all gradients but the last ones have been sent to the stage before.
        other_backwards_ns: what all r of a replica but its first add.
        replica_done_ns: for distinct replicas, given by number, until their update is done.
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
    """Returns the bounds of a stage with each of some intervals.

    Args:
        beyond_ns: one micro-batch from the end of its F here until its gradients are back: both transfers and the round
            trip beyond. 0 for the last stage.
        busy_link_ns: the same while all micro-batches cross the link to the next stage, or the link back.
        stalls: how long transfers block the devices of the stage.
        enabled: the bounds to use.
    """
    f, r = stage.forward_ns, stage.critical_backward_ns
    depth = placement.schedule.max_in_flight
    per_replica = -(
        -num_microbatches // placement.num_replicas
    )  # of the replica with the last micro-batch, or one more
    # F of a replica that must follow its first r, because only `depth` micro-batches may be in flight.
    late_forwards = max(0, per_replica - depth // placement.num_replicas)
    round_trip = f + r + beyond_ns
    others = (per_replica - 1) * (r + stalls.recv_gradient_ns)
    # Work of distinct replicas, with the transfers that block them. The first activation comes before the first F.
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
    # Bound "return" if the device cannot compute while it sends: n - 1 gradients leave before the last one does.
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
    """Bound "last micro-batch" within one stage: when F of the last micro-batch starts, from the first F on."""
    f, r = stage.forward_ns, stage.critical_backward_ns
    num_replicas, depth = placement.num_replicas, placement.schedule.max_in_flight
    per_replica = -(-num_microbatches // num_replicas)
    # The replica has done its F before, and the r that its order puts before the last F.
    start: IntArray = (per_replica - 1) * (f + stalls.recv_activation_ns) + late_forwards * (r + stalls.next_stage_ns)
    if late_forwards:
        # The first r needs a round trip; the others, and the F between them, follow it.
        start = np.maximum(start, round_trip + (late_forwards - 1) * (f + r))
    # Every depth-th micro-batch before the last one makes a round trip, one after another.
    # docs/algorithm.md, Last micro-batch, third item.
    rounds, extra = divmod(num_microbatches - 1, depth)
    if rounds:
        start = np.maximum(start, rounds * np.minimum(round_trip, INF // rounds) + extra // num_replicas * f)
    return start


def largest(terms: Iterable[tuple[str, IntArray]], enabled: Set[str], otherwise: IntArray) -> IntArray:
    """Returns the element-wise maximum of the terms of enabled bounds, `otherwise` if there are none."""
    return maximum([values for name, values in terms if name in enabled] or [otherwise])


def maximum(values: Iterable[IntArray]) -> IntArray:
    """Returns the element-wise maximum of arrays that broadcast together."""
    return reduce(np.maximum, values)


def clip_inf(values: IntArray) -> IntArray:
    """Returns the values, `INF` if they are larger: a sum of infinities stays infinity."""
    clipped: IntArray = np.minimum(values, INF)
    return clipped
