"""Which micro-batches and replicas `trip_bound.py` considers individually.

Replica q of a stage with R replicas runs the micro-batches q, q + R and so on, and is the (q + 1)-th fastest: so it is
known when its first one can arrive, and how many others follow its last one. The tables have one row for each range of
numbers of micro-batches before or after another one.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.tracked_arrays import (
    GRADIENT,
    MAX_GRADIENTS,
    MAX_KINDS,
    MAX_REPLICAS,
    MAX_ROUNDS,
    OF_KIND,
    REPLICA,
    ROUND,
    WAIT,
    Tracked,
)
from bapipe.planner.device_line.trip_tables import AFTER
from bapipe.planner.stages.intervals import IntArray

SMALLEST = (1, 2, 4)
"""Numbers of micro-batches that have rows besides those in equal steps."""

SMALL_PART, SMALL_STEPS = 1 / 4, 3 / 4
"""1F1B with turns distinguished: the first `SMALL_PART` of the numbers gets `SMALL_STEPS` of the steps."""

VECTOR = 4
"""The number of rows in one vector of a processor."""

FINE = 4
"""If there are at most this many times as many micro-batches as steps, each number has its own row."""

FEW_ROUNDS = 2
"""1F1B: with at least this many micro-batches per device only the last round is considered."""

LAST_PARTS = (1 / 32, 1 / 16, 3 / 32, 1 / 8, 5 / 32, 3 / 16, 1 / 4, 3 / 8, 1 / 2)
"""GPipe, where replicas run all their F first: micro-batches at these parts before the last one have rows, too."""

BEFORE_GRADIENTS = (0, 1, 4)
"""GPipe: the B after the gradient of a replica's micro-batch are considered, for one with this many before it."""

PARTS, PARTS_OF_FEWER = (0.25, 0.5, 0.75, 1.0), (0.0, 0.5)
"""Which replicas are considered: those at these parts of all with the maximum number of micro-batches, and of those
with one less; and the last one of all, which is the slowest."""


def tracked_microbatches(prefix: PrefixBound, num_steps: int) -> Tracked:
    """Returns what the compiled programme needs to know of micro-batches before and after others, and of the cuts.

    Args:
        num_steps: into how many equal steps the numbers before and after are divided.
    """
    num, most = prefix.num_microbatches, prefix.classes.most
    left = num - 1 - (-(-num // most) - 1) * most
    if num <= FINE * num_steps:
        num_steps = num
    most_left = int(left.max())
    spread = _spread_small if prefix.tells_turns else _spread
    behind, before = spread(0, most_left, num_steps), spread(0, int(most.max()) - 1, num_steps)
    if _has_rounds(prefix):  # numbers after earlier rounds than the last one matter less
        behind = np.unique([*behind, *_spread(most_left, num - 1, num if num_steps == num else num_steps // 3)])
    if prefix.are_forwards_first:
        last = [num - int(np.ceil(num * part)) for part in LAST_PARTS]
        before = np.unique([*before, *last[:: len(LAST_PARTS) // min(len(LAST_PARTS), num_steps)], num - 1])
    behind, before = _in_vectors(behind), _in_vectors(before)
    sizes, firsts = np.arange(1, int(most[-1]) + 1), prefix.classes.fewest - 1
    num_rows = AFTER + behind.size + before.size
    rows = _Rows(behind, num_rows, AFTER), _Rows(before, num_rows, AFTER + behind.size), _Rows(before, before.size, 0)
    of_behind, of_before, of_late = rows
    lasts = num - 1 - (-(-num // sizes) - 1) * sizes
    more_behind, then_behind = of_behind.earlier(sizes, firsts, num)
    more_before, then_before = of_before.earlier(sizes, firsts, num)
    places = of_behind.places(sizes, firsts, num, is_behind=True), of_before.places(sizes, firsts, num)
    looked_at = _looked_at(prefix, left)
    replicas, replica_ns = _replicas(prefix, looked_at, of_before, of_behind)
    at_host = np.zeros(prefix.num_devices + 1, dtype=np.int64)
    if not prefix.has_one_speed:  # of equal devices any may be idle, so hosts are unknown
        at_host[1:-1] = np.diff(prefix.boundaries_before) > 0
    send, back = (
        np.pad(np.stack(both), ((0, 0), (1, 1)))
        for both in zip((prefix.send_ns, prefix.back_ns), prefix.between_hosts_ns, strict=True)
    )
    tracked = Tracked(
        behind=behind,
        more_behind=more_behind,
        then_behind=then_behind,
        of_class=of_behind.between(lasts, lasts, firsts),
        of_any=of_behind.between(np.zeros_like(sizes), sizes - 1, firsts),
        of_all=of_behind.between(np.zeros_like(sizes), np.full_like(sizes, num - 1), firsts)[0],
        of_more=of_behind.least(np.arange(num), np.full(num, num - 1)),
        before=before,
        more_before=more_before + 1.0,
        then_before=then_before,
        last_before=of_before.last(sizes, firsts, num),
        then_late=of_late.earlier(sizes, firsts, num)[1],
        num_levels=0,
        places=np.concatenate(places, axis=1),
        speeds=prefix.speeds if prefix.has_one_kind else prefix.speeds[:0],
        waits=_waits(prefix, of_before),
        replicas=replicas,
        replica_ns=replica_ns,
        rounds=_rounds(prefix, of_behind, min(num_steps, MAX_ROUNDS) if _has_rounds(prefix) else 0),
        of_kinds=_of_kinds(prefix),
        gradients=_gradients(prefix, looked_at, of_late),
        num_gradients=before.size * prefix.tells_gradients,
        is_rough=False,
        critical_share=float(np.min([sums.least_shares[1] for sums in prefix.kinds_of_stages.sums])),
        send=send,
        back=back,
        both=send + back,
        at_host=at_host,
    )
    # Only known now: `_Rows` counts the levels that the calls above need.
    return tracked._replace(num_levels=max(each.num_levels for each in rows))


def _spread(fewest: int, most: int, num_steps: int) -> IntArray:
    """Returns numbers from `fewest` to `most` in equal steps, and those of `SMALLEST` between them."""
    steps = np.linspace(fewest, most, min(num_steps, most - fewest) + 1).astype(np.int64)
    return np.unique([*(number for number in SMALLEST if fewest < number < most), *steps])


def _spread_small(fewest: int, most: int, num_steps: int) -> IntArray:
    """Returns the same with most steps among the small numbers: few stages have as many devices as the largest."""
    if most - fewest <= num_steps:
        return _spread(fewest, most, num_steps)
    num_small, last_small = round(num_steps * SMALL_STEPS), fewest + int((most - fewest) * SMALL_PART)
    return np.unique([*_spread(fewest, last_small, num_small), *_spread(last_small, most, num_steps - num_small)])


def _in_vectors(numbers: IntArray) -> IntArray:
    """Adds numbers in the middle of the widest gaps, so that the number of rows is a multiple of `VECTOR`."""
    while numbers.size % VECTOR and np.diff(numbers).max(initial=1) > 1:
        widest = int(np.argmax(np.diff(numbers)))
        numbers = np.insert(numbers, widest + 1, (numbers[widest] + numbers[widest + 1]) // 2)
    return numbers


class _Rows:
    """The rows of a table, one for each range of numbers of micro-batches, and where minima over several rows are.

    The table is extended to a sparse table: level k holds the minima of 2^k rows from each one on, so the minimum of
    any range of rows is the lesser of two entries, whose places are given.

    Attributes:
        numbers: the first number of micro-batches, before or after another one, of each row. [rows]
        num_levels: how many levels are needed.
    """

    def __init__(self, numbers: IntArray, num_rows: int, first: int) -> None:
        """A level has `num_rows` rows, of which these begin at `first`."""
        self.numbers, self.num_levels = numbers, 1
        self._num_rows, self._first = num_rows, first

    def least(self, first: IntArray, last: IntArray) -> IntArray:
        """Returns two places whose lesser value is the minimum over the rows of numbers `first` to `last`. [..., 2]"""
        first, last = (np.searchsorted(self.numbers, those, side="right") - 1 for those in (first, last))
        level = np.log2(last - first + 1).astype(np.int64)
        self.num_levels = max(self.num_levels, int(level.max(initial=0)) + 1)
        places = np.stack([first, last + 1 - (1 << level)], axis=-1)
        found: IntArray = self._first + level[..., None] * self._num_rows + places
        return found

    def between(self, first: IntArray, last: IntArray, firsts: IntArray) -> IntArray:
        """Returns the same for classes, as the union of the ranges of their numbers of replicas. [classes, ..., 2]

        Args:
            firsts: the first number of each class, less 1.
        """
        return self.least(np.minimum.reduceat(first, firsts), np.maximum.reduceat(last, firsts))

    def earlier(self, sizes: IntArray, firsts: IntArray, num: int) -> tuple[Floats, IntArray]:
        """Returns how many micro-batches at least a replica had before one of each row, and the rows of its first ones.

        Args:
            sizes: numbers of replicas, 1, 2 and so on.
            num: the number of micro-batches.
        """
        most = np.append(firsts[1:], sizes[-1])[np.searchsorted(firsts, sizes - 1, side="right") - 1]
        more = self.numbers // most[:, None]
        then = self.between(self.numbers - more * most[:, None], self._ends(num) - more * sizes[:, None], firsts)
        return more[firsts].astype(float), then

    def last(self, sizes: IntArray, firsts: IntArray, num: int) -> IntArray:
        """Returns the rows of the last micro-batches of the replicas that run those of each row."""
        replicas, both = sizes[:, None], np.stack([self.numbers, self._ends(num)])[:, None]
        turns, last = (both - num) // replicas, num - replicas + (both - num) % replicas
        has_every = turns[0] < turns[1]
        first = np.where(has_every, np.maximum(num - replicas, 0), last[0])
        return self.between(first, np.where(has_every, num - 1, last[1]), firsts)

    def places(self, sizes: IntArray, firsts: IntArray, num: int, *, is_behind: bool = False) -> IntArray:
        """Returns the number of the first replica that may run a micro-batch of each row. [classes, rows]"""
        first, last = self.numbers, self._ends(num)
        if is_behind:
            first, last = num - 1 - last, num - 1 - first
        replicas = sizes[:, None]
        each = np.where(first // replicas < last // replicas, 0, first % replicas)
        found: IntArray = np.minimum.reduceat(each, firsts)
        return found

    def _ends(self, num: int) -> IntArray:
        return np.append(self.numbers[1:], num) - 1


def _waits(prefix: PrefixBound, before: _Rows) -> NDArray[np.void]:
    """Returns what the first B of a stage waits for: `WAIT`. [classes]

    In GPipe a replica runs all its F first; in 1F1B as many as there are devices from the stage on per replica, which
    are few if plans use few devices.
    """
    num = prefix.num_microbatches
    waits = np.zeros(prefix.classes.fewest.size, dtype=WAIT)
    waits["num_first"] = waits["num_any"] = 1
    if prefix.are_forwards_first:
        sizes, firsts = np.arange(1, int(prefix.classes.most[-1]) + 1), prefix.classes.fewest - 1
        last = (-(-num // sizes) - 1) * sizes
        waits["num_first"] = np.minimum.reduceat(-(-num // sizes), firsts)
        waits["num_any"] = np.minimum.reduceat(num // sizes, firsts)
        waits["before_first"] = before.between(last, last, firsts)
        waits["before_any"] = before.between(np.maximum(num - sizes, 0), np.full_like(sizes, num - 1), firsts)
    return waits


def _replicas(
    prefix: PrefixBound, looked_at: IntArray, before: _Rows, behind: _Rows
) -> tuple[NDArray[np.void], Floats]:
    """Returns considered replicas of each class, and lower bounds on the time of 1 ns of work on them; see `Tracked`.

    Args:
        looked_at: see `_looked_at`.
    """
    num, num_classes, (g, k, few, most, q, highest, count) = (
        prefix.num_microbatches,
        prefix.classes.fewest.size,
        looked_at.T,
    )
    replicas = np.zeros((num_classes, MAX_REPLICAS), dtype=REPLICA)
    replica_ns = np.zeros((prefix.num_devices, num_classes, MAX_REPLICAS))
    first_last, last_last = (
        np.minimum(those, num - 1) for those in (q + (count - 1) * few, highest + (count - 1) * most)
    )
    replicas["count"][g, k], replicas["first"][g, k] = count, before.least(q, highest)
    replicas["last"][g, k] = before.least(first_last, last_last)
    replicas["behind"][g, k] = behind.least(num - 1 - last_last, num - 1 - first_last)
    speeds = tuple(prefix.speeds.tolist())
    for each in np.unique(g):
        here = np.flatnonzero(g == each)
        numbers = tuple(zip(q[here].tolist(), (highest[here] == most[here] - 1).tolist(), strict=True))
        of_class = _speeds(speeds, prefix.has_one_kind, int(few[here[0]]), int(most[here[0]]), numbers)
        replica_ns[:, each, : here.size] = 1 / of_class
    return replicas, replica_ns


def _looked_at(prefix: PrefixBound, left: IntArray) -> IntArray:
    """Returns the considered replicas: class and index within it, the class's fewest and most devices, and `_places`.

    Args:
        left: minimum of micro-batches after the last one of the replica with the very first one. [classes]

    Returns:
        [replicas, 7]
    """
    found, classes = [np.zeros((0, 7), dtype=np.int64)], prefix.classes
    for g, (few, most) in enumerate(zip(classes.fewest.tolist(), classes.most.tolist(), strict=True)):
        places = dict.fromkeys(_places(prefix, few, most, int(left[g])))
        found += [np.array([[g, k, few, most, *place]]) for k, place in enumerate(places)]
    return np.concatenate(found)


def _gradients(prefix: PrefixBound, looked_at: IntArray, late: _Rows) -> NDArray[np.void]:
    """Returns the micro-batches from whose gradients on the B of those replicas are considered: `GRADIENT`, for GPipe.

    At least two B are left, or all: with one, the sums would not rise as a stage gets longer.
    """
    gradients = np.zeros((prefix.classes.fewest.size, MAX_REPLICAS, MAX_GRADIENTS), dtype=GRADIENT)
    if not prefix.tells_gradients:
        return gradients
    g, k, few, most, q, highest, count = looked_at.T
    num_before = np.zeros_like(g)
    for earlier in BEFORE_GRADIENTS[:MAX_GRADIENTS]:
        is_in = (count - earlier >= 2) | (earlier == 0)
        at = g[is_in], k[is_in], num_before[is_in]
        first, last = (
            np.minimum(those, prefix.num_microbatches - 1) for those in (q + earlier * few, highest + earlier * most)
        )
        gradients["count"][at], gradients["rows"][at] = (count - earlier)[is_in], late.least(first, last)[is_in]
        num_before += is_in
    return gradients


def _has_rounds(prefix: PrefixBound) -> bool:
    """Returns whether rounds before the last matter: in GPipe, and in 1F1B with few micro-batches per device."""
    return prefix.are_forwards_first or prefix.num_microbatches < FEW_ROUNDS * prefix.num_devices


def _rounds(prefix: PrefixBound, behind: _Rows, num_rounds: int) -> NDArray[np.void]:
    """Returns the considered rounds of the replica with the very first micro-batch. [classes, MAX_ROUNDS]"""
    num = prefix.num_microbatches
    rounds = np.zeros((prefix.classes.fewest.size, MAX_ROUNDS), dtype=ROUND)
    for g, (few, most) in enumerate(zip(prefix.classes.fewest.tolist(), prefix.classes.most.tolist(), strict=True)):
        last = -(-num // most) - 1
        counts = np.unique(np.linspace(1, last, min(last, num_rounds)).astype(np.int64))
        for k, count in enumerate(counts.tolist()):
            after = num - 1 - (count - 1) * np.array([most, few])
            rounds[g, k] = count, behind.least(*after)
    return rounds


def _of_kinds(prefix: PrefixBound) -> NDArray[np.void]:
    """Returns the slowest replica of each kind, for stages on devices of several kinds. [positions, classes, MAX_KINDS]

    For all numbers of devices of a class, so among the fewest; the order of the devices in a stage is known.
    """
    num_devices = prefix.num_devices
    found = np.zeros((num_devices, prefix.classes.fewest.size, MAX_KINDS), dtype=OF_KIND)
    if prefix.has_one_kind:
        return found
    speeds, own = tuple(prefix.speeds.tolist()), tuple(prefix.kinds_of_stages.of_device.tolist())
    class_of = tuple(prefix.line.class_of[rank] for rank in range(num_devices))
    for g, (few, most) in enumerate(zip(prefix.classes.fewest.tolist(), prefix.classes.most.tolist(), strict=True)):
        for p, k, kind, count, ns in _slowest_of_kinds(speeds, own, class_of, prefix.num_microbatches, few, most):
            if k < MAX_KINDS:
                found[p, g, k] = kind, count, ns
    return found


@lru_cache(maxsize=4096)
def _slowest_of_kinds(
    speeds: tuple[float, ...], own: tuple[int, ...], class_of: tuple[int, ...], num: int, few: int, most: int
) -> list[tuple[int, int, int, int, float]]:
    """Returns, for stages on `few` to `most` devices of several kinds and for each kind: the first device, the kind's
    number and set, and the micro-batches and the time of 1 ns of work of its replica that takes longest for these.

    Args:
        speeds, own, class_of: of the devices, see `LayerSums`, `StageKinds` and `DeviceLine`.
        num: the number of micro-batches.
    """
    v, kinds, found = np.array(speeds), np.array(own), []
    for p in range(len(speeds) - few + 1):
        devices = p + np.argsort(class_of[p : p + few], kind="stable")  # the order of the replicas
        counts = (num - 1 - np.arange(few)) // few + 1 if few == most else np.full(few, num // most)
        took, each = counts / v[devices], np.unique(kinds[p : p + few])
        for k, kind in enumerate(each.tolist() if each.size > 1 else ()):
            slowest = int(np.argmax(np.where(kinds[devices] == kind, took, -1.0)))
            found.append((p, k, kind, int(counts[slowest]), float(1 / v[devices[slowest]])))
    return found


def _places(prefix: PrefixBound, few: int, most: int, left: int) -> Iterator[tuple[int, int, int]]:
    """Yields the considered replicas of stages of a class: lowest and highest number, and minimum of micro-batches.

    The minimum is over all numbers R of replicas of the class; the first M mod R have one more than the others.
    """
    num = prefix.num_microbatches
    count, least = -(-num // most), num // most
    yield from ((q, q, count) for q in (int(left * part) for part in PARTS) if q > 0)
    if prefix.has_one_kind and 0 < least < count and num // few == least:
        first = num % few
        yield from ((q, q, least) for q in (first + int((few - 1 - first) * part) for part in PARTS_OF_FEWER))
        yield few - 1, most - 1, least


@lru_cache(maxsize=4096)
def _speeds(
    speeds: tuple[float, ...], is_sorted: bool, few: int, most: int, numbers: tuple[tuple[int, bool], ...]
) -> Floats:
    """Returns upper bounds on the speeds of some replicas of the stages of `few` to `most` devices from each one on.

    Args:
        is_sorted: whether the replicas are in the order of these speeds; if not, each may be the fastest one.
        numbers: the number of each replica, and whether it is the last one of stages of any size.

    Returns:
        [positions, numbers]; arbitrary where no stage of the class can begin.
    """
    v = np.array(speeds)
    padded = np.append(v, np.full(most - 1, v.min()))
    windows = np.lib.stride_tricks.sliding_window_view(padded, most)
    if not is_sorted:
        return np.repeat(windows.max(axis=1)[:, None], len(numbers), axis=1)
    # With more devices, the replica with a given number is no slower, and the last one no faster.
    places = [q for q, _ in numbers]
    found: Floats = -np.partition(-windows, places, axis=1)[:, places]
    padded = np.append(v, np.full(few - 1, v.max()))
    slowest = np.lib.stride_tricks.sliding_window_view(padded, few).min(axis=1)
    are_last = np.array([is_last for _, is_last in numbers])
    return np.where(are_last, np.minimum(found, slowest[:, None]), found)
