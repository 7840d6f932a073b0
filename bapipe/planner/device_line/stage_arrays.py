"""The arrays of a prefix bound, as the compiled programmes take them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.arrays import Floats, Ints

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
            "held",  # `stash` plus a buffer for what comes back to a stage that ends there
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
"""The places of these sums in `BoundInputs.columns`."""

BOUNDED_STAGE = np.dtype(
    [
        ("own", np.int64),  # the index of the set of kinds of the stage,
        ("before", np.int64),  # of the kinds of the stage and the devices before it,
        ("behind", np.int64),  # and of the kinds from its first device on
        ("few", np.int64),  # minimum of devices
        ("most", np.int64),  # maximum of devices
        ("in_flight", np.int64),  # maximum of micro-batches in flight on one replica, 0 if the schedule has no limit
        ("last_in_flight", np.int64),  # the same if the stage is the last one
        ("num_rounds", np.int64),  # minimum of consecutive round trips to the last stage
        ("count", np.float64),  # micro-batches of one replica
        ("fastest", np.float64),  # lower bound on the time of 1 ns of work, on any replica,
        ("forward", np.float64),  # for F of the replica with `count`,
        ("backward", np.float64),  # for its B,
        ("until", np.float64),  # on the devices up to the stage's last one,
        ("before_ns", np.float64),  # on the devices before it, at most `forward`,
        ("behind_ns", np.float64),  # on those after it, likewise,
        ("from_here", np.float64),  # and on any device from its first one on
        ("busiest", np.float64),  # the same for all micro-batches of the busiest replica
        ("slack", np.float64),  # ns by which a chain of actions may be shorter than the sums over layers
        ("last_ring", np.float64),  # ns of the ring of the last bucket
        ("ring_latency", np.float64),  # ns per bucket
        ("ring_rate", np.float64),  # ns per byte
        ("limit_bytes", np.float64),  # of each device
        ("num_stashes", np.float64),  # minimum that some device holds if the stage does not recompute
        ("may_recompute", np.int64),
        ("is_behind", np.int64),  # whether another stage comes before it
        ("trips", np.float64, 2),  # consecutive round trips, 0 if there are none,
        ("steps", np.float64, 2),  # and the F and r between them, for two chains
    ]
)
"""What is known of stages by their first device and class of numbers of devices."""


class Savings(NamedTuple):
    """For `least_again`: lower bounds on the F of recomputed layers by the bytes of their stashes.

    Attributes:
        rates: prices, in ns of F per byte. [rates]
        reached, begun: at each price, the value of recomputation up to a boundary: of the bytes of recomputed layers,
            less their F, the bytes kept between them and others, and a buffer for what comes back. A stage's value is
            at most `reached` at its end less `begun` at its begin, where the first stage keeps nothing, and others keep
            what they receive. [rates, boundaries], [2, rates, boundaries]
    """

    rates: Floats
    reached: Floats
    begun: Floats


class BoundInputs(NamedTuple):
    """The inputs of the compiled programmes that do not depend on the step time.

    Attributes:
        layers: `LAYER_SUMS` on each set of kinds; the first set is all kinds. [sets, boundaries]
        columns: the same numbers, contiguous for each sum. [sets, LAYER_SUMS, boundaries]
        stages: `BOUNDED_STAGE`. [positions, classes]
        savings: of recomputation, on the kinds where it saves the most.
        one_way, both_ways: lower bounds on transfers over 0, 1, 2 ... cuts, in ns. [cuts]
        boundaries_before: the boundaries between hosts before each position. [positions]
        extra_one_way, extra_both: what a boundary between hosts that no stage spans adds, in ns.
        max_bucket: bytes that no bucket reaches.
        max_gradients: the maximum bytes of gradients between two adjacent boundaries.
        has_cycles: whether F and B of early stages wait for each other: 1F1B, and more micro-batches than devices.
        rounding_ns: by how much an action may be shorter than the sum over its layers.
        is_rounded: whether times are rounded because some device has a speed other than 1.
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
