"""The all-reduce buckets of all layer intervals [begin, end) between legal cuts: how they fill, and when they are done.

Buckets fill from the last layer, so one pass down the layers serves all intervals with the same end, and one down the
begins then advances all ends at once. Shapes as in `intervals.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.formats.layer_profile import LayerProfile
from bapipe.planner.stages.intervals import IntArray, IntervalIndex
from bapipe.simulator.stage_cost import BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFill:
    """How the all-reduce buckets of every interval fill.

    Attributes:
        full: last layers first, for each layer that fills buckets: the ends of the intervals whose bucket it fills, its
            bytes, how many of them members of a group sum, and when its gradients are ready. Each of the four: [filled
            buckets]
        num_full: how many entries of `full` lie between each boundary and the next. [boundaries]
        last_bytes, last_group_bytes, last_ready_ns: the same of what remains for the last bucket. [intervals]
    """

    full: tuple[tuple[IntArray, IntArray, IntArray, IntArray], ...]
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
    """Returns how the buckets fill, which depends neither on the devices nor on the links.

    Args:
        last_action_ns: how long B, or W, takes of layers [first, stop), during which the links carry buckets; if None,
            all buckets are taken as ready at 0.
        has_replicas: whether all gradients are summed, not only those that the members of a group sum.
    """
    stops = np.array(intervals.cuts)
    # State of the bucket that is filling, for each end. [boundaries]
    num_bytes, group_bytes, ready_ns = (np.zeros(intervals.num_boundaries, dtype=np.int64) for _ in range(3))
    unfilled = np.zeros((3, intervals.num_boundaries, intervals.num_boundaries), dtype=np.int64)  # [3, begin, end]
    full: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    num_full = [0] * intervals.num_boundaries
    begin = intervals.num_boundaries - 2
    for layer in reversed(range(len(layers))):
        gradient_bytes = layers[layer].summed_bytes(has_replicas=has_replicas)
        if gradient_bytes:
            # One bucket per end serves all begins, as buckets fill from the last layer. This layer is in
            # the intervals that begin here or before and end later. [boundaries]
            inside = stops > layer
            num_bytes = np.where(inside, num_bytes + gradient_bytes, num_bytes)
            if layers[layer].group_gradient_bytes:
                group_bytes = np.where(inside, group_bytes + layers[layer].group_gradient_bytes, group_bytes)
            if last_action_ns is not None:
                # The gradients of this layer are ready when its backward and that of all later layers are over.
                first = np.full_like(stops, layer)
                ready_ns = np.where(inside, last_action_ns(first, np.maximum(stops, first)), ready_ns)
            # A bucket is full from `BUCKET_BYTES` on, as in the simulator (`stage_cost.fill_buckets`).
            overflowing = np.flatnonzero(num_bytes >= BUCKET_BYTES)
            if len(overflowing):
                full.append((overflowing, num_bytes[overflowing], group_bytes[overflowing], ready_ns[overflowing]))
                num_full[begin] += 1
                num_bytes[overflowing] = group_bytes[overflowing] = 0
        # The first layer after boundary `begin`: what has not filled a bucket is the last one of [begin, end).
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
    """Returns when the all-reduces of every interval are done. [intervals]

    Args:
        bucket_ns: how long those of buckets take, from their bytes and how many of these the members of a group sum.
    """
    # done_ns[end]: when the full buckets of [begin, end) are done; a bucket waits for the one before and for its
    # gradients.
    done_ns = np.zeros(intervals.num_boundaries, dtype=np.int64)
    done_from = np.zeros((intervals.num_boundaries, intervals.num_boundaries), dtype=np.int64)  # [begin, end]
    # The buckets were recorded from the last layer to the first; the loop goes through them in that order.
    full_buckets = iter(fill.full)
    for begin in reversed(range(intervals.num_boundaries - 1)):
        for _ in range(fill.num_full[begin]):
            ends, num_bytes, group_bytes, ready_ns = next(full_buckets)
            done_ns[ends] = np.maximum(done_ns[ends], ready_ns) + bucket_ns(num_bytes, group_bytes)
        # Every layer from `begin` on has been seen: these are the final times of its intervals. [boundaries]
        done_from[begin] = done_ns
    full_done_ns = done_from[intervals.begins, intervals.ends]
    # The bucket that remains unfilled comes after all full ones.
    last_bucket_ns = bucket_ns(fill.last_bytes, fill.last_group_bytes)
    last_done_ns = np.maximum(full_done_ns, fill.last_ready_ns) + last_bucket_ns
    all_done_ns: IntArray = np.where(fill.last_bytes > 0, last_done_ns, full_done_ns)
    return all_done_ns
