"""Sums, maxima and times of all layer intervals, against one interval at a time."""

from random import Random

import numpy as np

from bapipe.planner.stages.chain import Chain
from bapipe.planner.stages.interval_memory import IntervalMemory
from bapipe.planner.stages.interval_times import IntervalTimes
from bapipe.planner.stages.intervals import INF, IntervalIndex
from tests.random_profiles import random_profile

CUTS = (0, 1, 3, 4, 7)
"""Boundaries of a chain of seven layers that cannot be cut everywhere."""


def test_rows_are_the_intervals_of_one_begin() -> None:
    intervals = IntervalIndex(CUTS)
    assert [(int(b), int(e)) for b, e in zip(intervals.begins, intervals.ends, strict=True)] == [
        (begin, end) for begin in range(4) for end in range(begin + 1, 5)
    ]
    for begin in range(4):
        assert intervals.begins[intervals.row(begin)].tolist() == [begin] * (4 - begin)


def test_sums_and_maxima_of_layers() -> None:
    intervals, values = IntervalIndex(CUTS), [5, 1, 4, 1, 5, 9, 2]
    pairs = [(CUTS[begin], CUTS[end]) for begin, end in zip(intervals.begins, intervals.ends, strict=True)]
    assert intervals.sums(values).tolist() == [sum(values[begin:end]) for begin, end in pairs]
    assert intervals.maxima(values).tolist() == [max(values[begin:end]) for begin, end in pairs]


def test_minimum_per_begin() -> None:
    intervals = IntervalIndex(CUTS)
    values = np.array([7, 3, 8, 9, 2, 6, 5, 4, 4, 1])
    assert intervals.every.min_per_begin(values).tolist() == [3, 2, 4, 1, INF]


def test_memory_of_all_intervals_is_that_of_each() -> None:
    for seed in range(20):
        profile = random_profile(Random(seed), 7, shares=seed % 2 == 1, frozen=seed % 4 > 1)
        intervals, chain = IntervalIndex(CUTS), Chain(profile, 2, 1.0)
        memory = IntervalMemory(intervals, profile, 2, (chain.send_bytes, chain.grad_bytes))
        for i, (begin, end) in enumerate(zip(intervals.begins, intervals.ends, strict=True)):
            cost = chain.cost(CUTS[begin], CUTS[end])
            held = cost.param_bytes + cost.gradient_bytes + cost.optimizer_bytes + cost.workspace_bytes
            assert memory.static_bytes[i] == held
            assert memory.stash_bytes[i] == cost.stash_bytes


def test_times_of_all_intervals_are_those_of_each() -> None:
    for seed in range(20):
        random = Random(seed)
        profile = random_profile(random, 7, splits_badly=seed % 2 == 1)
        speed = random.choice([1.0, 0.3, 1.5])
        intervals, chain = IntervalIndex(CUTS), Chain(profile, 2, speed)
        table = IntervalTimes(intervals, profile, 2, speed)
        times = table.at(slice(None))
        shuffled = np.array(random.sample(range(len(intervals.begins)), len(intervals.begins)))
        for name in ("forward_ns", "backward_ns", "input_grad_ns", "weight_grad_ns", "update_ns"):
            assert (getattr(table.at(shuffled), name) == getattr(times, name)[shuffled]).all()
        for i, (begin, end) in enumerate(zip(intervals.begins, intervals.ends, strict=True)):
            cost = chain.cost(CUTS[begin], CUTS[end])
            assert times.forward_ns[i] == cost.forward_ns
            assert times.backward_ns[i] == cost.backward_ns
            assert (times.input_grad_ns[i], times.weight_grad_ns[i]) == (cost.input_grad_ns, cost.weight_grad_ns)
            assert times.update_ns[i] == cost.update_ns
