"""The arrays of compiled code: what layers take on the devices of a line, plans, and the state of estimates.

Below, S are the stages of a plan, M the micro-batches, D the devices, L the layers and K the kinds of devices. Times
are in ns.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.arrays import Floats, Ints

Records = Any
"""A numpy record array: several named values for each index."""

Random = NDArray[np.uint64]
"""The state of a generator of random numbers. [1]"""

LAYER = np.dtype(
    [
        ("update", "f8"),
        ("state_bytes", "i8"),
        ("gradient_bytes", "i8"),
        ("bucket_begin", "i8"),
        ("first_gradient", "i8"),
        ("returned_bytes", "i8"),
        ("sent_inside", "f8"),
        ("sent_between", "f8"),
        ("returned_inside", "f8"),
        ("returned_between", "f8"),
    ]
)
"""By layer. Sums over the layers before it: updates; parameters, gradients and states of the optimizer; gradients. The
first layer of the full bucket of gradients that ends before it, -1 if there is none. The first layer from it on with
gradients. For the cut before it: the bytes sent back, and the transfers both ways within a host and between hosts."""

DEVICE = np.dtype(
    [("kind", "i8"), ("speed", "f8"), ("host", "i8"), ("same_host", "i8"), ("class_of", "i8"), ("limit_bytes", "i8")]
)
"""`same_host` is the previous device on the same host, -1 if none. Replicas take micro-batches in order of class."""

ESTIMATED_STAGE = np.dtype(
    [
        *((name, "i8") for name in ("begin", "end", "first", "count", "in_flight")),
        *((name, "i8") for name in ("num_forward", "num_backward", "sent_each")),
        *((name, "f8") for name in ("least_forward", "least_backward", "least_after", "busiest", "last", "done")),
        ("back", "f8"),
        ("num_others", "i8"),
    ]
)
"""A stage: its layers and devices, and the forwards of a replica before its first backward; how many micro-batches have
run F and B; after how many micro-batches the same link to the next stage is used again. The minima over replicas of
the times for F, for B, and after the last B; the total time of the busiest one; the earliest times at which the last B
ends and the stage is done. `back` and `num_others` belong to `_least_ns` and not to this stage."""

RECOMPUTED = np.dtype([*((name, "i8") for name in ("begin", "end", "kind", "kept", "num_bytes")), ("forward_ns", "f8")])
"""F of the layers that a stage recomputes, and what it must save: see `Need` of `recompute_programme.py`."""


class LayerItems(NamedTuple):
    """The times and bytes of layers by which a stage chooses those that it recomputes.

    Attributes:
        forward: sums of F over the layers before each one. [K, L + 1]
        stash: the same for stashes, in bytes. [L + 1]
        sent: the bytes that pass each cut; none pass the first. [L + 1]
        num_alone: how many of the first layers may be recomputed without the rest of their stage; the loss may not.
    """

    forward: Floats
    stash: Ints
    sent: Ints
    num_alone: int


class Costs(NamedTuple):
    """What layers take and need on the devices of a line.

    Attributes:
        boundaries: the layer after each boundary at which layers may be cut.
        layers: see `LAYER`. [L + 1]
        items: F, stashes and what is sent.
        backward: sums over the layers before each one. [K, L + 1]
        workspace_bytes: [L]
        devices: see `DEVICE`. [D]
        latency, ns_per_byte: of links within a host and between hosts. [2]
    """

    num_microbatches: int
    is_gpipe: bool
    may_recompute: bool
    boundaries: Ints
    layers: Records
    items: LayerItems
    backward: Floats
    workspace_bytes: Ints
    devices: Records
    latency: Floats
    ns_per_byte: Floats


class Plan(NamedTuple):
    """A plan that is changed in place.

    Attributes:
        num_stages: how many entries are in use. [1]
        cuts: the boundaries at the start and the end of the stages. [most stages + 1]
        counts: the numbers of devices of the stages. [most stages]
    """

    num_stages: Ints
    cuts: Ints
    counts: Ints


class Replicas(NamedTuple):
    """The replicas of all stages, in those of a stage in the order of their micro-batches. All [D]

    Attributes:
        rank: the device.
        forward, backward: the times of F and B of one micro-batch.
        after: the time from the last B until the replica is done.
        time: when the last action so far ended.
    """

    rank: Ints
    forward: Floats
    backward: Floats
    after: Floats
    time: Floats


class Notes(NamedTuple):
    """The state of an estimate of a plan's step.

    Attributes:
        stages: see `ESTIMATED_STAGE`. [S]
        sent, returned: when the outputs arrive at each stage, and the gradients at the one before it. [S + 1, M]
        hosts: the host of each micro-batch's replica; stage s has row s + 1. [S + 2, M]
        recomputed: see `RECOMPUTED`; a cache of choices, by a hash of the stage. [entries]
        came: see `choose_recomputed`. [L, 2]
    """

    stages: Records
    replicas: Replicas
    sent: Floats
    returned: Floats
    hosts: NDArray[np.int32]
    recomputed: Records
    came: NDArray[np.int8]


class Moves(NamedTuple):
    """The inputs of moves.

    Attributes:
        weights: the weight of each move, in the order of `_move`. [moves]
        devices_before: the devices that the layers before each boundary are worth, if devices are divided in proportion
            to work. [boundaries]
    """

    num_devices: int
    num_microbatches: int
    weights: Ints
    devices_before: Floats
