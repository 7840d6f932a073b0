"""Which micro-batches and replicas `trip_bound.py` looks at one by one.

Replica number q of a stage with R of them runs the micro-batches q, q + R and so on, and is the (q + 1)-th fastest: so
it is known when its first one can be there, and how many others are behind its last one. Such numbers of micro-batches,
before one and behind one, are rounded down to those of which the tables have rows.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.replica_weights import FloatArray

if TYPE_CHECKING:
    from bapipe.planner.device_line.trip_limits import Tracked

SMALLEST = (1, 2, 4)
"""Numbers of micro-batches that have rows besides those in equal steps."""

VECTOR = 4
"""So many rows are one vector of a processor."""

FINE = 4
"""If there are no more micro-batches than so many times the steps, each number has a row."""

FEW_ROUNDS = 2
"""1F1B: with so many micro-batches for each device only the last round is looked at."""

LAST_PARTS = (1 / 32, 1 / 16, 3 / 32, 1 / 8, 5 / 32, 3 / 16, 1 / 4, 3 / 8, 1 / 2)
"""GPipe, where replicas run all their F first: the micro-batches so much before the last one have rows, too."""

PARTS, PARTS_OF_FEWER = (0.25, 0.5, 0.75, 1.0), (0.0, 0.5)
"""Where the replicas are that are looked at, among all that have the most micro-batches, and among those with one less;
and the last one of all, which is the slowest."""


def tracked_microbatches(prefix: PrefixBound, num_steps: int) -> "Tracked":
    """Returns what the compiled programme needs to know of micro-batches before and behind others, and of the cuts.

    Args:
        num_steps: into how many equal steps the numbers before and behind are divided.
    """
    from bapipe.planner.device_line.trip_limits import MAX_ROUNDS, Tracked

    num, most = prefix.num_microbatches, prefix.classes.most
    left = num - 1 - (-(-num // most) - 1) * most
    if num <= FINE * num_steps:
        num_steps = num
    most_left = int(left.max())
    behind, before = _spread(0, most_left, num_steps), _spread(0, int(most.max()) - 1, num_steps)
    if _has_rounds(prefix):  # what is behind those before the last one makes less of a difference
        behind = np.unique([*behind, *_spread(most_left, num - 1, num if num_steps == num else num_steps // 3)])
    if prefix.are_forwards_first:
        last = [num - int(np.ceil(num * part)) for part in LAST_PARTS]
        before = np.unique([*before, *last[:: len(LAST_PARTS) // min(len(LAST_PARTS), num_steps)], num - 1])
    behind, before = _in_vectors(behind), _in_vectors(before)
    more_behind, more_before = behind // most[:, None], before // most[:, None]
    replicas, replica_ns = _replicas(prefix, left, before, behind)
    at_host = np.zeros(prefix.num_devices + 1, dtype=np.int64)
    if not prefix.has_one_speed:  # of alike devices some may be idle, wherever
        at_host[1:-1] = np.diff(prefix.boundaries_before) > 0
    send, back = (
        np.pad(np.stack(both), ((0, 0), (1, 1)))
        for both in zip((prefix.send_ns, prefix.back_ns), prefix.between_hosts_ns, strict=True)
    )
    return Tracked(
        behind=behind,
        more_behind=more_behind.astype(float),
        then_behind=_row(behind, behind - more_behind * most[:, None]),
        of_class=_row(behind, left),
        before=before,
        more_before=more_before + 1.0,
        then_before=_row(before, before - more_before * most[:, None]),
        waits=_waits(prefix, before),
        replicas=replicas,
        replica_ns=replica_ns,
        rounds=_rounds(prefix, behind, min(num_steps, MAX_ROUNDS) if _has_rounds(prefix) else 0),
        of_kinds=_of_kinds(prefix),
        is_rough=False,
        critical_share=float(np.min([sums.least_shares[1] for sums in prefix.kinds_of_stages.sums])),
        send=send,
        back=back,
        both=send + back,
        at_host=at_host,
    )


def _spread(fewest: int, most: int, num_steps: int) -> IntArray:
    """Numbers between two in equal steps, and these; and the smallest ones."""
    steps = np.linspace(fewest, most, min(num_steps, most - fewest) + 1).astype(np.int64)
    return np.unique([*(number for number in SMALLEST if fewest < number < most), *steps])


def _in_vectors(numbers: IntArray) -> IntArray:
    """More of them, each in the middle of the widest gap, so that compiled loops over their rows have no odd ends."""
    while numbers.size % VECTOR and np.diff(numbers).max(initial=1) > 1:
        widest = int(np.argmax(np.diff(numbers)))
        numbers = np.insert(numbers, widest + 1, (numbers[widest] + numbers[widest + 1]) // 2)
    return numbers


def _row(numbers: IntArray, wanted: IntArray) -> IntArray:
    """The row of the largest of some numbers up to each wanted one."""
    return np.searchsorted(numbers, wanted, side="right") - 1


def _waits(prefix: PrefixBound, before: IntArray) -> "NDArray[np.void]":
    """What the first B of a stage waits for: `WAIT`. [classes]

    A replica runs all its F first in GPipe; in 1F1B as many as there are devices from the stage on for each replica,
    which is little where plans use few devices.
    """
    from bapipe.planner.device_line.trip_limits import WAIT

    num = prefix.num_microbatches
    waits = np.zeros(prefix.classes.fewest.size, dtype=WAIT)
    waits["num_first"] = waits["num_any"] = 1
    if prefix.are_forwards_first:
        sizes = np.arange(1, int(prefix.classes.most[-1]) + 1)
        columns = {
            "num_first": -(-num // sizes),
            "num_any": num // sizes,
            "before_first": _row(before, (-(-num // sizes) - 1) * sizes),
            "before_any": _row(before, num - sizes),
        }
        for name, values in columns.items():
            waits[name] = np.minimum.reduceat(values, prefix.classes.fewest - 1)
    return waits


def _replicas(
    prefix: PrefixBound, left: IntArray, before: IntArray, behind: IntArray
) -> tuple["NDArray[np.void]", FloatArray]:
    """Which replicas of each class are looked at, and ns of the work of 1 ns on them, at least: see `Tracked`.

    Args:
        left: micro-batches behind the last one of the replica with the very first one, at least. [classes]
    """
    from bapipe.planner.device_line.trip_limits import MAX_REPLICAS, REPLICA

    num, classes = prefix.num_microbatches, prefix.classes
    replicas = np.zeros((left.size, MAX_REPLICAS), dtype=REPLICA)
    replica_ns = np.zeros((prefix.num_devices, left.size, MAX_REPLICAS))
    speeds = tuple(prefix.speeds.tolist())
    for g, (few, most) in enumerate(zip(classes.fewest.tolist(), classes.most.tolist(), strict=True)):
        found = list(dict.fromkeys(_places(prefix, few, most, int(left[g]))))
        for k, (q, highest, count) in enumerate(found):
            first, last = _row(before, np.array([q, (count - 1) * few + q]))
            replicas[g, k] = count, first, last, _row(behind, np.array(num - 1 - (count - 1) * most - highest))
        if found:
            numbers = tuple((q, highest == most - 1) for q, highest, _ in found)
            replica_ns[:, g, : len(found)] = 1 / _speeds(speeds, prefix.has_one_kind, few, most, numbers)
    return replicas, replica_ns


def _has_rounds(prefix: PrefixBound) -> bool:
    """Whether rounds before the last one matter: in 1F1B, where B of most of them wait for no F."""
    return prefix.are_forwards_first or prefix.num_microbatches < FEW_ROUNDS * prefix.num_devices


def _rounds(prefix: PrefixBound, behind: IntArray, num_rounds: int) -> "NDArray[np.void]":
    """Which rounds of the replica with the very first micro-batch are looked at. [classes, MAX_ROUNDS]"""
    from bapipe.planner.device_line.trip_limits import MAX_ROUNDS, ROUND

    num = prefix.num_microbatches
    rounds = np.zeros((prefix.classes.fewest.size, MAX_ROUNDS), dtype=ROUND)
    for g, most in enumerate(prefix.classes.most.tolist()):
        last = -(-num // most) - 1
        counts = np.unique(np.linspace(1, last, min(last, num_rounds)).astype(np.int64))
        for k, count in enumerate(counts.tolist()):
            rounds[g, k] = count, _row(behind, np.array(num - 1 - (count - 1) * most))
    return rounds


def _of_kinds(prefix: PrefixBound) -> "NDArray[np.void]":
    """The slowest replica of each kind of stages on devices of several ones. [positions, classes, MAX_KINDS]

    Of stages of any number of devices in a class, so among the fewest; the order of the devices in a stage is known.
    """
    from bapipe.planner.device_line.trip_limits import MAX_KINDS, OF_KIND

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
    """The first device of stages on `few` to `most` devices of several kinds, the number and the set of a kind, and of
    its replica that takes longest for its micro-batches how many these are, and ns of the work of 1 ns.

    Args:
        speeds, own, class_of: of the devices, see `LayerSums`, `StageKinds` and `DeviceLine`.
        num: micro-batches.
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
    """The replicas that are looked at in stages of a class: their least and highest number, and their micro-batches.

    For all numbers R of the class they have so many at least: up to M mod R have one more than the others.
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
) -> FloatArray:
    """The speeds of some replicas of the stages of `few` to `most` devices from each one on, at most.

    Args:
        is_sorted: whether the replicas are in the order of these speeds; if not, each may be the fastest one.
        numbers: of the replicas, and whether they are the last ones of stages of any size.

    Returns:
        [positions, numbers]; behind the last stages of a class anything.
    """
    v = np.array(speeds)
    padded = np.append(v, np.full(most - 1, v.min()))
    windows = np.lib.stride_tricks.sliding_window_view(padded, most)
    if not is_sorted:
        return np.repeat(windows.max(axis=1)[:, None], len(numbers), axis=1)
    # Among more devices the one with a number is no slower, and the last one no faster.
    places = [q for q, _ in numbers]
    found: FloatArray = -np.partition(-windows, places, axis=1)[:, places]
    padded = np.append(v, np.full(few - 1, v.max()))
    slowest = np.lib.stride_tricks.sliding_window_view(padded, few).min(axis=1)
    are_last = np.array([is_last for _, is_last in numbers])
    return np.where(are_last, np.minimum(found, slowest[:, None]), found)
