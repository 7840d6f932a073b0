"""The all-reduce buckets of all layer intervals [begin, end) between legal cuts: how they fill, and when they are done.

Buckets fill from the last layer on, so all intervals with the same end have the same first buckets. One pass from the
last layer to the first therefore fills the buckets of all intervals, with an array entry per end; a second pass adds up
their times. Shapes as in `intervals.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bapipe.formats.layer_profile import LayerProfile
from bapipe.planner.stages.intervals import IntArray, IntervalIndex
from bapipe.simulator.stage_cost import BUCKET_BYTES


class FullBuckets(NamedTuple):
    """The buckets that one layer completes, one for each end of an interval. All [completed buckets]

    Attributes:
        ends: the boundaries at which the intervals with these buckets end.
        num_bytes: the bytes of each bucket.
        group_bytes: how many of these the members of a group sum.
        ready_ns: when its gradients are ready, from the start of the interval's last B or W.
    """

    ends: IntArray
    num_bytes: IntArray
    group_bytes: IntArray
    ready_ns: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFill:
    """How the all-reduce buckets of every interval fill.

    Attributes:
        full: the full buckets, for each layer that completes some, from the last layer to the first.
        num_full: how many entries of `full` belong to layers between each boundary and the next. [boundaries]
        last_bytes, last_group_bytes, last_ready_ns: as in `FullBuckets`, for the bucket that is not full at the begin
            of the interval; 0 bytes if there is none. [intervals]
    """

    full: tuple[FullBuckets, ...]
    num_full: tuple[int, ...]
    last_bytes: IntArray
    last_group_bytes: IntArray
    last_ready_ns: IntArray


def fill_buckets(
    intervals: IntervalIndex,
    layers: Sequence[LayerProfile],
    last_action_ns: Callable[[IntArray, IntArray], IntArray] | None,
    *,
    has_replicas: bool,
) -> BucketFill:
    """Returns how the buckets of every interval fill; the number of replicas and their links make no difference.

    Args:
        last_action_ns: the time of the last B or W for layers [first, stop), if links carry buckets meanwhile;
            None if they do not: then all buckets are ready at 0.
        has_replicas: whether all gradients are summed, or only those that the members of a group sum.
    """
    stops = np.array(intervals.cuts)
    # The bucket that is being filled, for each end. [boundaries]
    num_bytes, group_bytes, ready_ns = (np.zeros(intervals.num_boundaries, dtype=np.int64) for _ in range(3))
    unfilled = np.zeros((3, intervals.num_boundaries, intervals.num_boundaries), dtype=np.int64)  # [3, begin, end]
    full: list[FullBuckets] = []
    num_full = [0] * intervals.num_boundaries
    begin = intervals.num_boundaries - 2
    for layer in reversed(range(len(layers))):
        gradient_bytes = layers[layer].summed_bytes(has_replicas=has_replicas)
        if gradient_bytes:
            # The ends after this layer: their intervals contain it, if they begin here or before. [boundaries]
            inside = stops > layer
            num_bytes = np.where(inside, num_bytes + gradient_bytes, num_bytes)
            if layers[layer].group_gradient_bytes:
                group_bytes = np.where(inside, group_bytes + layers[layer].group_gradient_bytes, group_bytes)
            if last_action_ns is not None:
                # The gradients of this layer are ready after its backward and that of all later layers.
                first = np.full_like(stops, layer)
                ready_ns = np.where(inside, last_action_ns(first, np.maximum(stops, first)), ready_ns)
            # A bucket is full from `BUCKET_BYTES` on, as in the simulator (`stage_cost.fill_buckets`).
            overflowing = np.flatnonzero(num_bytes >= BUCKET_BYTES)
            if len(overflowing):
                full.append(
                    FullBuckets(overflowing, num_bytes[overflowing], group_bytes[overflowing], ready_ns[overflowing])
                )
                num_full[begin] += 1
                num_bytes[overflowing] = group_bytes[overflowing] = 0
        # The first layer after boundary `begin`: what has not filled a bucket is the last bucket of [begin, end).
        if layer == intervals.cuts[begin]:
            unfilled[0, begin], unfilled[1, begin], unfilled[2, begin] = num_bytes, group_bytes, ready_ns
            begin -= 1
    return BucketFill(
        full=tuple(full),
        num_full=tuple(num_full),
        last_bytes=unfilled[0][intervals.begins, intervals.ends],
        last_group_bytes=unfilled[1][intervals.begins, intervals.ends],
        last_ready_ns=unfilled[2][intervals.begins, intervals.ends],
    )


def buckets_done_ns(
    intervals: IntervalIndex, fill: BucketFill, bucket_ns: Callable[[IntArray, IntArray], IntArray]
) -> IntArray:
    """Returns when the all-reduces of every interval are done, from the start of its last B or W. [intervals]

    Args:
        bucket_ns: the time of an all-reduce, from its bytes and how many of these the members of a group sum.
    """
    # done_ns[end]: when the full buckets of [begin, end) are done; a bucket waits for its gradients, and for the bucket
    # before it.
    done_ns = np.zeros(intervals.num_boundaries, dtype=np.int64)
    done_from = np.zeros((intervals.num_boundaries, intervals.num_boundaries), dtype=np.int64)  # [begin, end]
    # As the full buckets are stored, from the last layer to the first.
    full_buckets = iter(fill.full)
    for begin in reversed(range(intervals.num_boundaries - 1)):
        for _ in range(fill.num_full[begin]):
            ends, num_bytes, group_bytes, ready_ns = next(full_buckets)
            done_ns[ends] = np.maximum(done_ns[ends], ready_ns) + bucket_ns(num_bytes, group_bytes)
        # All layers from `begin` on are included: these times are final for the intervals with this begin. [boundaries]
        done_from[begin] = done_ns
    full_done_ns = done_from[intervals.begins, intervals.ends]
    # The bucket that is not full comes after all full ones.
    last_bucket_ns = bucket_ns(fill.last_bytes, fill.last_group_bytes)
    last_done_ns = np.maximum(full_done_ns, fill.last_ready_ns) + last_bucket_ns
    all_done_ns: IntArray = np.where(fill.last_bytes > 0, last_done_ns, full_done_ns)
    return all_done_ns
