"""Wanted cuts are rounded to the nearest boundaries, and every stage keeps a layer."""

from itertools import combinations, pairwise
from random import Random

import pytest

from bapipe.planner.stages.nearest_cuts import nearest_cuts


def nearest(positions: list[int], target: float) -> int:
    return min(range(len(positions)), key=lambda boundary: abs(positions[boundary] - target))


@pytest.mark.parametrize("seed", range(200))
def test_nearest_boundaries(seed: int) -> None:
    random = Random(seed)
    last = random.randint(2, 9)
    positions = sorted(random.sample(range(100), last + 1))
    targets = sorted(random.uniform(positions[0], positions[-1]) for _ in range(random.randint(0, last - 1)))
    cuts = nearest_cuts(positions, targets)
    assert cuts in combinations(range(1, last), len(targets))  # ascending, and a layer before, between and behind
    wanted = [nearest(positions, target) for target in targets]
    if all(b > a for a, b in pairwise([0, *wanted, last])):
        assert list(cuts) == wanted


@pytest.mark.parametrize(
    ("positions", "targets", "cuts"),
    [
        ([0, 0, 0, 0], [0, 0], (1, 2)),  # layers without time
        ([0, 10, 20, 30, 40], [1, 2, 3], (1, 2, 3)),
        ([0, 1, 2, 3, 40], [30, 35, 39], (1, 2, 3)),
        ([0, 1, 2, 3, 40], [1.2, 39], (1, 3)),
        ([0, 5], [], ()),
    ],
)
def test_stages_that_would_have_no_layer(positions: list[int], targets: list[float], cuts: tuple[int, ...]) -> None:
    assert nearest_cuts(positions, targets) == cuts
