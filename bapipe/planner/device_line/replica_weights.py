"""How busy the replicas of stages are, for stages that begin at each position of a line of devices."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.device_line.in_flight import FORWARDS_FIRST
from bapipe.planner.device_line.replica_classes import ReplicaClasses
from bapipe.planner.stages.intervals import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWeights:
    """Lower bounds for stages by their first device and class of numbers of devices. All [positions, classes].

    Attributes:
        counts: micro-batches of one replica of the stage, the one that takes the longest for its micro-batches.
        speed: an upper bound on the speed of that replica.
        forward_speed: an upper bound on the speed of the replica whose F precede the first backward of that one: in
            GPipe that may be any replica, as one of the last stage runs all its F first.
        busiest: micro-batches per unit of speed of the busiest replica.
        fastest: the largest speed of any replica.
        until: the largest speed of the devices up to the stage's last one.
        before, behind: the time for 1 ns of work on the fastest device before the stage, or after it; at most the time
            at `forward_speed`.
        from_here: the time for 1 ns of work on the fastest device from a position on. [positions]
    """

    counts: IntArray
    speed: Floats
    forward_speed: Floats
    busiest: Floats
    fastest: Floats
    until: Floats
    before: Floats
    behind: Floats
    from_here: Floats


def replica_weights(speeds: Floats, schedule: str, num_microbatches: int, classes: ReplicaClasses) -> ReplicaWeights:
    """Returns the weights of stages of `classes` on devices of the given speeds."""
    fewest, most = tuple(classes.fewest.tolist()), tuple(classes.most.tolist())
    return _weights(tuple(speeds.tolist()), schedule in FORWARDS_FIRST, num_microbatches, fewest, most)


@lru_cache(maxsize=8)
def _weights(
    speeds: tuple[float, ...], are_forwards_first: bool, num: int, fewest: tuple[int, ...], most: tuple[int, ...]
) -> ReplicaWeights:
    v, few, many = np.array(speeds), np.array(fewest), np.array(most)
    columns = [_replica(v, num, *each) for each in zip(fewest, most, strict=True)]
    counts, speed = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
    sums = np.concatenate([[0.0], np.cumsum(v)])
    positions = np.arange(len(v))[:, None]
    total = sums[np.minimum(positions + many, len(v))] - sums[positions]
    busiest = np.maximum(counts / speed, -(-num // many) / v.max())
    fastest = np.stack([_largest_of_next(v, number) for number in most], axis=1)
    forward_speed = fastest if are_forwards_first else speed
    first = np.maximum.accumulate(np.append(0.0, v[:-1]))[:, None]
    last = np.append(np.maximum.accumulate(v[::-1])[::-1], 0.0)
    return ReplicaWeights(
        counts=counts,
        speed=speed,
        forward_speed=forward_speed,
        fastest=fastest,
        until=np.maximum.accumulate(v)[np.minimum(positions + few - 1, len(v) - 1)],
        busiest=np.maximum(busiest, num / total),
        before=1 / np.maximum(first, forward_speed),
        behind=1 / np.maximum(last[np.minimum(positions + few, len(v))], forward_speed),
        from_here=1 / last[:-1],
    )


def _largest_of_next(v: Floats, number: int) -> Floats:
    """Returns the maximum of the `number` values from each position on. [positions]"""
    padded = np.append(v, np.zeros(number - 1))
    largest: Floats = np.lib.stride_tricks.sliding_window_view(padded, number).max(axis=1)
    return largest


def _replica(v: Floats, num: int, few: int, most: int) -> tuple[IntArray, Floats]:
    """Returns micro-batches and maximum speed of one replica of stages of `few` to `most` devices. [positions]

    Every replica, even the slowest, has at least M // R micro-batches, and M mod R replicas have one more: whichever
    these are, the slowest of them is no faster than the (M mod R)-th fastest of all.
    """
    at_least, more = num // most, num % most
    if len(set(v.tolist())) == 1:
        return np.full(len(v), -(-num // most)), v
    slowest = np.full(len(v), v.min())
    windows = np.lib.stride_tricks.sliding_window_view(v, few).min(axis=1) if few <= len(v) else v[:0]
    slowest[: len(windows)] = windows
    counts = np.full(len(v), at_least)
    if more == 0 or num // few != at_least:
        return counts, slowest
    padded = np.append(v, np.full(most - 1, -np.inf))
    of_most = np.lib.stride_tricks.sliding_window_view(padded, most)
    with_more = np.partition(of_most, most - more, axis=1)[:, most - more]
    with_more = np.where(np.isfinite(with_more), with_more, v.min())  # the line has no such stage there
    has_more = (at_least + 1) / with_more > at_least / slowest
    return np.where(has_more, at_least + 1, counts), np.where(has_more, with_more, slowest)
