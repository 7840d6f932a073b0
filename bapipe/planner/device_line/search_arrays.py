"""The arrays that compiled code works on: what layers take on the devices of a line, plans, and notes on estimates.

Below, S are the stages of a plan, M the micro-batches, D the devices, L the layers and K the kinds of devices. Times
are in ns.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Records = Any
"""An array with several named values for each index, as in a table."""

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
"""Of the layers before each one: sums of updates, of parameters, gradients and states of the optimizer, and of
gradients; and the first layer of the full bucket of gradients that ends there, -1 without one. The first layer from
each one on with gradients. Of the cut before each layer: bytes backwards, and the transfers both ways within a host and
between hosts."""

DEVICE = np.dtype(
    [("kind", "i8"), ("speed", "f8"), ("host", "i8"), ("same_host", "i8"), ("class_of", "i8"), ("limit_bytes", "i8")]
)
"""`same_host` is the device before on the same host, -1 without one. Replicas take micro-batches by class."""

STAGE = np.dtype(
    [
        *((name, "i8") for name in ("begin", "end", "first", "count", "in_flight")),
        *((name, "i8") for name in ("num_forward", "num_backward", "sent_each")),
        *((name, "f8") for name in ("least_forward", "least_backward", "least_after", "busiest", "last", "done")),
        ("back", "f8"),
        ("num_others", "i8"),
    ]
)
"""The layers and devices of a stage, and the forwards of a replica before its first backward; of how many micro-batches
F and B have run, and how many later one is that goes over the same link to the next stage. What each replica takes at
least for F, for B and after its last B; what the busiest one takes in all; when its last B ends and when it is done at
the earliest. `back` and `num_others` belong to `_least_ns` and not to this stage."""

RECOMPUTED = np.dtype([*((name, "i8") for name in ("begin", "end", "kind", "kept", "num_bytes")), ("forward_ns", "f8")])
"""F of the layers that a stage recomputes, and what it must save, see `Need` of `recompute_programme.py`."""


class LayerItems(NamedTuple):
    """What layers take and keep, of which a stage may recompute some.

    Attributes:
        forward: sums of F over the layers before each one. [K, L + 1]
        stash: the same of stashes, in bytes. [L + 1]
        sent: the bytes that pass each cut; none pass the first. [L + 1]
        num_alone: so many first layers may be recomputed without all of their stage: the loss may not.
    """

    forward: Floats
    stash: Ints
    sent: Ints
    num_alone: int


class Costs(NamedTuple):
    """What layers take and need on the devices of a line.

    Attributes:
        boundaries: the layer behind each boundary at which layers may be cut.
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
        num_stages: so many are in use. [1]
        cuts: the boundaries at the start and the end of the stages. [most stages + 1]
        counts: their devices. [most stages]
    """

    num_stages: Ints
    cuts: Ints
    counts: Ints


class Replicas(NamedTuple):
    """The replicas of all stages: where the devices of each are, in the order of their micro-batches. All [D]

    Attributes:
        rank: the device.
        forward, backward: what F and B of one micro-batch take.
        after: what follows the last B.
        time: when the last action so far ended.
    """

    rank: Ints
    forward: Floats
    backward: Floats
    after: Floats
    time: Floats


class Notes(NamedTuple):
    """What is known of a plan while its step is estimated.

    Attributes:
        stages: see `STAGE`. [S]
        sent, returned: when the outputs arrive at each stage, and the gradients at the one before it. [S + 1, M]
        hosts: of the replicas of each micro-batch; stage s has row s + 1. [S + 2, M]
        recomputed: see `RECOMPUTED`; what was chosen last for stages of each remainder of a number. [remainders]
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
    """What moves look at.

    Attributes:
        weights: how often each is made, in the order of `_move`. [moves]
        devices_before: the devices that the layers before each boundary are worth, if all layers share the devices
            equally. [boundaries]
    """

    num_devices: int
    num_microbatches: int
    weights: Ints
    devices_before: Floats
