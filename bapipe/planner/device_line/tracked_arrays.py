"""The arrays of `tracked.py`, as the compiled programmes take them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.device_line.stage_arrays import Floats, Ints

MAX_REPLICAS = 8
"""Replicas of a stage that are looked at one by one."""

MAX_ROUNDS = 6
"""Rounds of the replica with the very first micro-batch that are looked at, besides its last one."""

MAX_GRADIENTS = 3
"""Micro-batches of such a replica, from whose gradient on its B are looked at: GPipe."""

MAX_KINDS = 4
"""Kinds of devices of a stage of which the slowest replica is looked at."""

ROUND = np.dtype(
    [
        ("count", np.int64),  # micro-batches that the replica has run; 0 if there is no round
        ("behind", np.int64, 2),  # the rows of how many are behind the last of them
    ]
)
"""A part of the micro-batches of the replica with the very first one, in stages of a class."""

OF_KIND = np.dtype(
    [
        ("own", np.int64),  # the set of the kind
        ("count", np.int64),  # micro-batches, at least; 0 if there is no replica
        ("ns", np.float64),  # of the work of 1 ns
    ]
)
"""The slowest replica of one kind of stages on devices of several kinds, by their first device and class."""

WAIT = np.dtype(
    [
        ("num_first", np.int64),  # F of the replica of the very first micro-batch before its B, at least
        ("num_any", np.int64),  # and of any replica before its first B,
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
        ("behind", np.int64, 2),  # the rows of how many are behind that
    ]
)
"""A replica of the stages of a class."""

GRADIENT = np.dtype(
    [
        ("count", np.int64),  # B that its replica has left with its own, at least; 0 if there is none
        ("rows", np.int64, 2),  # of its gradient
    ]
)
"""A micro-batch of such a replica."""


class Tracked(NamedTuple):
    """The micro-batches and replicas that are told apart; see `tracked.py`.

    Attributes:
        behind: numbers of micro-batches behind one, from each up to the next one a row of what follows; the first is 0.
            [behind]
        more_behind, then_behind: of each row, how many the replica of the one before them has at least, and the rows
            of how many are behind the last of these then, the first and the last one. [classes, behind], [..., 2]
        of_class, of_any, of_all: the rows of how many are behind the last one of the replica with the very first one,
            and of any replica; and all rows. [classes, 2], [classes, 2], [2]
        of_more: of each number the rows of as many behind, or more. [micro-batches, 2]
        before: numbers of micro-batches before one, from each up to the next one a row of when they are there; the
            first is 0. [before]
        more_before, then_before: of each row, how many F its replica has run with its own at least, and the rows of
            the first of them. [classes, before], [..., 2]
        last_before: and the rows of the last one that its replica runs. [classes, before, 2]
        then_late: the same as `then_before` of gradients. [classes, before, 2]
        num_levels: see `note_levels`; of rows two places are given, of which the lesser is their least.
        places: of the replicas of each row of a table, behind and then before, the first one; the fastest come first.
            [classes, behind + before]
        speeds: of the devices; nothing where the order of the replicas is not theirs. [positions]
        waits: `WAIT`. [classes]
        replicas: `REPLICA`. [classes, MAX_REPLICAS]
        replica_ns: ns of the work of 1 ns on them, at least. [positions, classes, MAX_REPLICAS]
        rounds: `ROUND`. [classes, MAX_ROUNDS]
        of_kinds: `OF_KIND`. [positions, classes, MAX_KINDS]
        gradients: `GRADIENT`. [classes, MAX_REPLICAS, MAX_GRADIENTS]
        num_gradients: rows of when gradients are there, of the micro-batches that `before` says: GPipe.
        is_rough: whether sums are taken apart, see `trips_apart.py`.
        critical_share: of what earlier stages wait for in the trip through any layers, at least.
        send, back: of one micro-batch and its gradient over the cut at each boundary: on any link, and from host to
            host. [2, boundaries]
        both: the sum of these.
        at_host: whether a cut behind so many devices is one from host to host. [devices + 1]
    """

    behind: Ints
    more_behind: Floats
    then_behind: NDArray[np.int64]
    of_class: Ints
    of_any: Ints
    of_all: Ints
    of_more: NDArray[np.int64]
    before: Ints
    more_before: Floats
    then_before: NDArray[np.int64]
    last_before: NDArray[np.int64]
    then_late: NDArray[np.int64]
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
