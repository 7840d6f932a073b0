"""The arrays of `tracked.py`, as the compiled programmes take them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.arrays import Floats, Ints

MAX_REPLICAS = 8
"""The maximum number of replicas of a stage that are considered individually."""

MAX_ROUNDS = 6
"""The maximum number of considered rounds of the replica with the very first micro-batch, besides its last one."""

MAX_GRADIENTS = 3
"""GPipe: the maximum number of micro-batches of such a replica from whose gradients on its B are considered."""

MAX_KINDS = 4
"""The maximum number of kinds of devices of a stage whose slowest replica is considered."""

ROUND = np.dtype(
    [
        ("count", np.int64),  # micro-batches that the replica has run; 0 if there is no round
        ("behind", np.int64, 2),  # the rows of how many follow the last of them
    ]
)
"""A part of the micro-batches of the replica with the very first one, in stages of a class."""

OF_KIND = np.dtype(
    [
        ("own", np.int64),  # the set of the kind
        ("count", np.int64),  # minimum of micro-batches; 0 if there is no replica
        ("ns", np.float64),  # the time of 1 ns of work
    ]
)
"""The slowest replica of one kind of stages on devices of several kinds, by their first device and class."""

WAIT = np.dtype(
    [
        ("num_first", np.int64),  # minimum of F that the replica of the very first micro-batch runs before its B
        ("num_any", np.int64),  # and of F that any replica runs before its first B
        ("before_first", np.int64, 2),  # the rows of the last one of them
        ("before_any", np.int64, 2),
    ]
)
"""What the first B of a stage waits for, by its class of numbers of devices."""

REPLICA = np.dtype(
    [
        ("count", np.int64),  # micro-batches, at least; 0 if there is no replica
        ("first", np.int64, 2),  # the rows of its first one,
        ("last", np.int64, 2),  # and of its last one
        ("behind", np.int64, 2),  # the rows of how many follow that
    ]
)
"""A replica of the stages of a class."""

GRADIENT = np.dtype(
    [
        ("count", np.int64),  # minimum of B left to its replica, with its own; 0 if there is none
        ("rows", np.int64, 2),  # of its gradient
    ]
)
"""A micro-batch of such a replica."""


class Tracked(NamedTuple):
    """The micro-batches and replicas that are distinguished; see `tracked.py`.

    Attributes:
        behind: the first number of each range of numbers of micro-batches that follow another one; each range has a row
            of what follows. The first is 0. [behind]
        more_behind, then_behind: for each row, the minimum of these that run on the replica of the one that they
            follow, and the rows of how many follow the last of these. [classes, behind], [..., 2]
        of_class, of_any, of_all: the rows of how many follow the last micro-batch of the replica with the very first
            one, and of any replica; and all rows. [classes, 2], [classes, 2], [2]
        of_more: for each number, the rows of that many that follow, or more. [micro-batches, 2]
        before: the first number of each range of numbers of micro-batches before another one; each range has a row of
            when that one arrives. The first is 0. [before]
        more_before, then_before: for each row, the minimum of F that its replica has run, its own included, and the
            rows of the first of them. [classes, before], [..., 2]
        last_before: for each row, the rows of the last micro-batch that its replica runs. [classes, before, 2]
        then_late: the same as `then_before` for gradients. [classes, before, 2]
        num_levels: of the sparse table, see `note_levels`; *rows* above are two places in it, the lesser of which is
            the minimum over a range of rows.
        places: the first (fastest) replica of each row, of those behind and then of those before.
            [classes, behind + before]
        speeds: of the devices; empty if the replicas are not in the order of their speeds. [positions]
        waits: `WAIT`. [classes]
        replicas: `REPLICA`. [classes, MAX_REPLICAS]
        replica_ns: lower bounds on the time of 1 ns of work on them. [positions, classes, MAX_REPLICAS]
        rounds: `ROUND`. [classes, MAX_ROUNDS]
        of_kinds: `OF_KIND`. [positions, classes, MAX_KINDS]
        gradients: `GRADIENT`. [classes, MAX_REPLICAS, MAX_GRADIENTS]
        num_gradients: the number of rows of when gradients arrive, by the ranges of `before`; GPipe only, else 0.
        is_rough: whether sums are minimized separately, see `trips_apart.py`.
        critical_share: the minimum share, in the work of any layers, of what earlier stages wait for.
        send, back: lower bounds on the transfers of a micro-batch and of its gradient over the cut at each boundary: on
            any link, and from host to host. [2, boundaries]
        both: the sum of these.
        at_host: whether a cut after this many devices is one between hosts. [devices + 1]
    """

    behind: Ints
    more_behind: Floats
    then_behind: Ints
    of_class: Ints
    of_any: Ints
    of_all: Ints
    of_more: Ints
    before: Ints
    more_before: Floats
    then_before: Ints
    last_before: Ints
    then_late: Ints
    num_levels: int
    places: Ints
    speeds: Floats
    waits: NDArray[Any]
    replicas: NDArray[Any]
    replica_ns: Floats
    rounds: NDArray[Any]
    of_kinds: NDArray[Any]
    gradients: NDArray[Any]
    num_gradients: int
    is_rough: bool
    critical_share: float
    send: Floats
    back: Floats
    both: Floats
    at_host: Ints
