"""What ranks of a job compare tells runs apart that would train something else, and no others."""

from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bapipe.runtime.job_facts import job_facts
from bapipe.runtime.train_config import TrainConfig
from bapipe.zoo.data.dataset import as_pipeline_dataset
from tests.multiprocess.fault_cases import plan_of, points, quiet

CONFIG = TrainConfig(steps=5, seed=3)


class Drawn(Dataset[tuple[Tensor, ...]]):
    """Points that are drawn anew each time."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return torch.rand(4), torch.tensor(1)


def test_each_difference_shows_in_its_own_fact() -> None:
    plan, data = plan_of(quiet, (2,), (0, 1)), as_pipeline_dataset(points())
    facts = job_facts(plan, CONFIG, data, None)
    assert (
        job_facts(plan, replace(CONFIG, data="elsewhere", timeout_s=1.0), as_pipeline_dataset(points()), None) == facts
    )
    other_data = torch.utils.data.TensorDataset(torch.zeros(50, 4), torch.arange(50))
    cases = {
        "the plan": job_facts(plan_of(quiet, (3,), (0, 1)), CONFIG, data, None),
        "the cpu profile": job_facts(msgspec.structs.replace(plan, profiles={"cpu": "5a" * 32}), CONFIG, data, None),
        "`seed`": job_facts(plan, replace(CONFIG, seed=4), data, None),
        "`optimizer_arguments`": job_facts(plan, replace(CONFIG, optimizer_arguments={"momentum": 0.5}), data, None),
        "the data": job_facts(plan, CONFIG, as_pipeline_dataset(other_data), None),
        "the checkpoint to continue from": job_facts(plan, CONFIG, data, Path("kept/step-000000004")),
    }
    for what, other in cases.items():
        assert {name for name in {**facts, **other} if facts.get(name) != other.get(name)} == {what}
    assert {"bapipe", "torch"} <= set(facts)


def test_data_that_are_drawn_anew_are_compared_by_their_number_only() -> None:
    facts = job_facts(plan_of(quiet, (2,), (0, 1)), CONFIG, as_pipeline_dataset(Drawn()), None)
    assert facts["the data"] == "50 samples"


def test_folders_may_be_given_as_texts() -> None:
    config = TrainConfig(steps=1, checkpoint="kept", weights="some.safetensors", tensorboard="board")  # type: ignore[arg-type]
    assert (config.checkpoint, config.weights, config.tensorboard) == (
        Path("kept"), Path("some.safetensors"), Path("board"),
    )  # fmt: skip
