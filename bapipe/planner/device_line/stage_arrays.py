"""The arrays of a prefix bound, as the compiled programmes take them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Boundaries = NDArray[np.int32]

LAYER_SUMS = np.dtype(
    [
        (name, np.float64)
        for name in (
            # Those of `TimeSums`, which differ between sets of kinds of devices.
            *("forward", "backward", "critical", "work", "trip", "first_bucket", "before_gradients"),
            "update",
            "gradients",  # bytes
            "state",  # bytes of parameters, gradients, and of the optimizer
            "stash",  # bytes of one micro-batch
            "held",  # the same, with a buffer for what comes back to a stage that ends there
        )
    ]
)
"""Sums over the layers before a boundary."""

(
    FORWARD,
    BACKWARD,
    CRITICAL,
    WORK,
    TRIP,
    FIRST_BUCKET,
    BEFORE_GRADIENTS,
    UPDATE,
    GRADIENTS,
    STATE,
    STASH,
    HELD,
) = range(len(LAYER_SUMS.names or ()))
"""Their places in `Problem.columns`."""

STAGE = np.dtype(
    [
        ("own", np.int64),  # the set of kinds of the stage,
        ("before", np.int64),  # of the stage and the devices before it,
        ("behind", np.int64),  # and from its first device on
        ("few", np.int64),  # devices, at least
        ("most", np.int64),
        ("in_flight", np.int64),  # micro-batches on one replica at most, 0 if the schedule has no limit
        ("last_in_flight", np.int64),  # the same if the stage is the last one
        ("num_rounds", np.int64),  # micro-batches that make a round trip to the last stage one after another, at least
        ("count", np.float64),  # micro-batches of one replica
        ("fastest", np.float64),  # ns of the work of 1 ns on any replica, at least,
        ("forward", np.float64),  # on the one with `count`,
        ("backward", np.float64),
        ("until", np.float64),  # on the devices up to the stage's last one,
        ("before_ns", np.float64),  # before it, no more than on the replica,
        ("behind_ns", np.float64),  # behind,
        ("from_here", np.float64),  # and on any from the first one on
        ("busiest", np.float64),  # the same of all micro-batches of the busiest replica
        ("slack", np.float64),  # ns by which a chain of actions may be shorter than the sums
        ("last_ring", np.float64),  # ns of the ring of the last bucket
        ("ring_latency", np.float64),  # ns of each bucket
        ("ring_rate", np.float64),  # ns per byte
        ("limit_bytes", np.float64),  # of each device
        ("num_stashes", np.float64),  # that some device holds at least if the stage does not recompute
        ("may_recompute", np.int64),
        ("is_behind", np.int64),  # another stage
        ("trips", np.float64, 2),  # round trips one after another, 0 if there are none,
        ("steps", np.float64, 2),  # and the F and r between them, in two ways
    ]
)
"""What is known of stages by their first device and class of numbers of devices."""


class Savings(NamedTuple):
    """What recomputed layers take, at least, if their stashes have so many bytes: `least_again`.

    Attributes:
        rates: ns of F for a byte. [rates]
        reached, begun: with each rate, by how much the bytes of recomputed layers are worth more than their F and than
            what is kept between them and others, and than a buffer for what comes back. Of a stage that is at most
            what is reached at its end, less what is begun where it begins: the first stage keeps nothing there, others
            what they receive. [rates, boundaries], [2, rates, boundaries]
    """

    rates: Floats
    reached: Floats
    begun: Floats


class Problem(NamedTuple):
    """What does not depend on the step time that is asked for.

    Attributes:
        layers: `LAYER_SUMS` on each set of kinds, the first one all. [sets, boundaries]
        columns: the same numbers, those of one sum after the other. [sets, LAYER_SUMS, boundaries]
        stages: `STAGE`. [positions, classes]
        savings: of recomputation, on the kinds where they are the largest.
        one_way, both_ways: transfers over 0, 1, 2 ... cuts at least, in ns. [cuts]
        boundaries_before: the boundaries between hosts before each position. [positions]
        extra_one_way, extra_both: what a boundary between hosts that no stage spans adds, in ns.
        max_bucket: bytes that no bucket has.
        max_gradients: bytes between two boundaries, at most.
        has_cycles: whether F and B of the first stages wait for each other: 1F1B, and more micro-batches than devices.
        rounding_ns: by how much an action may be shorter than the sum over its layers.
        is_rounded: whether actions on other speeds are rounded.
    """

    layers: NDArray[Any]
    columns: Floats
    stages: NDArray[Any]
    savings: Savings
    one_way: Floats
    both_ways: Floats
    boundaries_before: Ints
    extra_one_way: float
    extra_both: float
    num_microbatches: int
    max_speed: float
    max_bucket: float
    max_gradients: float
    is_alike: bool
    are_forwards_first: bool
    has_whole_backward: bool
    has_cycles: bool
    rounding_ns: float
    is_rounded: bool
