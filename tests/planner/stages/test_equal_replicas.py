"""Stages of equally many devices: their numbers, and pipelines of them."""

import pytest

from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.stages.equal_replicas import doublings, halves, pipeline_with_replicas
from tests.builders import chain, devices


@pytest.mark.parametrize(("number", "want"), [(0, []), (1, [1]), (6, [6, 3, 1]), (8, [8, 4, 2, 1])])
def test_halves(number: int, want: list[int]) -> None:
    assert halves(number) == want


@pytest.mark.parametrize(("most", "want"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_doublings(most: int, want: list[int]) -> None:
    assert doublings(most) == want


def test_each_stage_of_a_pipeline_has_as_many_replicas() -> None:
    options = PlanOptions(minibatch_size=8, schedules=["1f1b"])
    (problem,) = build_space({"a": chain([1] * 6)}, devices(6), options, sizes=[1]).problems
    (first,) = [root.first_placements for root in problem.roots if root.num_devices == 6]
    found = {num: pipeline_with_replicas(first, num) for num in range(1, 7)}
    assert {num: path and [each.num_replicas for each in path] for num, path in found.items()} == {
        1: [1] * 6, 2: [2] * 3, 3: [3] * 2, 4: None, 5: None, 6: [6],
    }  # fmt: skip
