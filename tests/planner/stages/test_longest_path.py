"""Longest paths in compiled code equal those in plain Python, number by number."""

from random import Random

import numpy as np
import pytest

from bapipe.planner.stages.longest_path import MIN_COMPILED, LongestPath, make_longest_path
from bapipe.planner.stages.longest_path_of_many import LongestPathOfMany
from bapipe.schedules import ALL
from bapipe.simulator.compiled import NUM_PHASES, compile_schedule


@pytest.mark.parametrize("schedule", ALL)
def test_compiled_paths_equal_plain_ones(schedule: str) -> None:
    for seed in range(6):
        random = Random(seed)
        compiled = compile_schedule(ALL[schedule](random.randint(1, 4), random.randint(1, 9)))
        queues = [random.random() < 0.5 for _ in compiled.channels]
        plain, many = LongestPath(compiled, queues), LongestPathOfMany(compiled, queues)
        num = NUM_PHASES * (max(compiled.durations) // NUM_PHASES + 1)
        of_each: list[list[list[int]]] = [[], [], []]
        for _ in range(5):
            times = [[random.randint(0, 5) for _ in range(count)] for count in (num, len(queues), compiled.num_ranks)]
            assert many.find(*times) == plain.find(*times)
            for known, vector in zip(of_each, times, strict=True):
                known.append(vector)
        columns = [np.array(vectors, dtype=np.int64).T.reshape(-1, 5) for vectors in of_each]
        assert many.lengths(*columns).tolist() == plain.lengths(*columns).tolist()
        assert plain.lengths(*columns).tolist() == [
            plain.find(*(c[:, i].tolist() for c in columns))[0] for i in range(5)
        ]


def test_many_actions_are_compiled() -> None:
    few, many = (compile_schedule(ALL["zb-v"](4, num)) for num in (MIN_COMPILED // 48, MIN_COMPILED // 24 + 1))
    assert type(make_longest_path(few, [False] * len(few.channels))) is LongestPath
    assert type(make_longest_path(many, [False] * len(many.channels))) is LongestPathOfMany
