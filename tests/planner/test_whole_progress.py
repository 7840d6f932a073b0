"""What is told while a search runs holds for the whole of it, and never gets worse."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest

import bapipe
from bapipe.errors import BapipeError
from bapipe.planner.whole_progress import WholeProgress
from tests.builders import devices
from tests.planner.test_linearizations import towers
from tests.random_profiles import random_cluster, random_profile

Told = list[tuple[int, int, int]]


def told_of(profiles: Any, cluster: Any, **options: Any) -> Told:
    """Returns what a search tells, after checks of the last of it against its result."""
    told: Told = []
    made = bapipe.plan(profiles, cluster, progress=lambda *figures: told.append(figures), **options)
    assert all(bound_ns <= made.prediction.step_ns for _, _, bound_ns in told)
    return told


def check_never_worse(told: Told) -> None:
    for before, after in pairwise(told):
        assert after[0] >= before[0]
        assert after[1] <= before[1]
        assert after[2] >= before[2]


@pytest.mark.parametrize("schedules", [["1f1b", "zb-v"], ["search"], ["1f1b", "gpipe"], ["interleaved-1f1b", "1f1b"]])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_step_and_the_bound_that_are_told_never_get_worse(schedules: list[str], seed: int) -> None:
    random = Random(seed)
    profile, cluster = random_profile(random, 6), random_cluster(random, 3)
    try:
        told = told_of([profile], cluster, minibatch_size=8, schedules=schedules)
    except BapipeError:
        pytest.skip("nothing fits")
    check_never_worse(told)


def test_along_several_orders_of_the_layers_too() -> None:
    check_never_worse(told_of([towers()], devices(2), minibatch_size=8))


def test_of_a_part_no_more_is_told_than_holds_for_all_parts() -> None:
    """Of the second part 5 is proven, but of the first 4 only; what is known of the whole stays when a part ends."""
    told: Told = []
    whole = WholeProgress(lambda *figures: told.append(figures))
    whole.others_ns = 3  # of the second part without a search
    whole(2, 10, 4)
    whole.others_ns = 4
    whole(1, 12, 1)
    whole(3, 9, 5)
    assert told == [(2, 10, 3), (3, 10, 3), (5, 9, 4)]
