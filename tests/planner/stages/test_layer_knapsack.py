"""The Pareto frontier of labels under several limits, by its definition."""

import numpy as np

from bapipe.planner.stages.layer_knapsack import BLOCK, _maximal


def test_the_rows_kept_are_those_that_no_earlier_one_dominates() -> None:
    random = np.random.default_rng(0)
    for num_rows in (0, 1, 7, 60, BLOCK - 1, BLOCK + 1, 3 * BLOCK):
        for num_columns in (2, 3):
            rows = random.integers(0, 12, (num_rows, num_columns)).tolist()
            expected = [
                i
                for i, own in enumerate(rows)
                if not any(all(a >= b for a, b in zip(other, own, strict=True)) for other in rows[:i])
            ]
            assert _maximal(np.array(rows, dtype=np.int64).reshape(-1, num_columns)).tolist() == expected
