"""Models that are no chains train on real ranks as they do whole: branches, tied weights, masks, dropout, uneven replicas."""

import pytest
import torch

from bapipe.training.launch.processes import launch
from tests.multiprocess.architecture_cases import ReplicaCase
from tests.multiprocess.branching_model_cases import Case, Outcome, three_ranks, two_ranks

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
UNEVEN = (
    ReplicaCase("Llama", (0, (1, 2))),
    ReplicaCase("T5", ((0, 1), 2)),
    ReplicaCase("ViT", ((0, 1, 2),)),  # four micro-batches
    ReplicaCase("ResNet", ((0, 1), 2)),
    ReplicaCase("GPT-OSS", (0, (1, 2))),
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
def three() -> list[tuple[list[Outcome], list[tuple[str, float]]]]:
    return launch(three_ranks, [f"cpu{i}" for i in range(3)], THREE, UNEVEN, timeout_s=300)


@pytest.mark.parametrize("index", range(len(TWO)), ids=lambda i: f"{TWO[i].model} {TWO[i].schedule}")
def test_two_ranks_equal_the_whole_model(
    index: int, two: list[tuple[list[Outcome], list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]]]
) -> None:
    _check([outcomes[index] for outcomes, _ in two])


@pytest.mark.parametrize("index", range(len(THREE)), ids=lambda i: f"{THREE[i].model} {THREE[i].schedule}")
def test_three_ranks_equal_the_whole_model(
    index: int, three: list[tuple[list[Outcome], list[tuple[str, float]]]]
) -> None:
    _check([outcomes[index] for outcomes, _ in three])


@pytest.mark.parametrize("index", range(len(UNEVEN)), ids=lambda i: f"{UNEVEN[i].name} {UNEVEN[i].ranks}")
def test_uneven_replicas_equal_the_whole_model(
    index: int, three: list[tuple[list[Outcome], list[tuple[str, float]]]]
) -> None:
    for _, outcomes in three:
        what, error = outcomes[index]
        assert error <= (1e-5 if UNEVEN[index].name == "GPT-OSS" else 1e-7 if what == "loss" else 1e-11), (what, error)


def test_dropout_does_not_depend_on_the_cut(
    two: list[tuple[list[Outcome], list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]]],
) -> None:
    for _, states in two:
        for split, alone in states:
            assert split
            assert all(torch.equal(split[name], alone[name]) for name in split)
