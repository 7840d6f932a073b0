"""Models that are no chains train on real ranks as they do whole: branches, tied weights, masks, dropout."""

import pytest
import torch

from bapipe.runtime.launch.processes import launch
from tests.multiprocess.branching_model_cases import Case, Outcome, run_models, two_ranks

TWO = (
    Case("hf/gpt2", "1f1b", 1),
    Case("hf/t5", "1f1b", 2),
    Case("hf/bert", "zb-h1", 3),
    Case("resnet50", "1f1b", 4),
    Case("gnmt", "1f1b", 5),
    Case("gpt2", "zb-h1", 6),
)
THREE = (
    Case("hf/t5", "gpipe", 11),
    Case("hf/resnet", "1f1b", 12),
    Case("gpt2", "1f1b", 13),
    Case("hf/vit", "1f1b", 14),
)


def _check(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert max(outcome.loss, outcome.gradient, outcome.parameter) <= 1e-10
    merged = {key for outcome in outcomes for key in outcome.keys}
    assert merged == set(outcomes[0].all_keys)


@pytest.fixture(scope="module")
def two() -> list[tuple[list[Outcome], list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]]]:
    return launch(two_ranks, ["cpu0", "cpu1"], TWO, (1, 2, 3), timeout_s=120)


@pytest.fixture(scope="module")
def three() -> list[list[Outcome]]:
    return launch(run_models, [f"cpu{i}" for i in range(3)], THREE, timeout_s=120)


@pytest.mark.parametrize("index", range(len(TWO)), ids=lambda i: f"{TWO[i].model} {TWO[i].schedule}")
def test_two_ranks_equal_the_whole_model(
    index: int, two: list[tuple[list[Outcome], list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]]]
) -> None:
    _check([outcomes[index] for outcomes, _ in two])


@pytest.mark.parametrize("index", range(len(THREE)), ids=lambda i: f"{THREE[i].model} {THREE[i].schedule}")
def test_three_ranks_equal_the_whole_model(index: int, three: list[list[Outcome]]) -> None:
    _check([outcomes[index] for outcomes in three])


def test_dropout_does_not_depend_on_the_cut(
    two: list[tuple[list[Outcome], list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]]],
) -> None:
    for _, states in two:
        for split, alone in states:
            assert split
            assert all(torch.equal(split[name], alone[name]) for name in split)
