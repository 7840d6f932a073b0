"""What ranks of a job compare tells runs apart that would train something else, and no others."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import Dataset

from bapipe.formats.plan import Plan
from bapipe.training.checkpoint.folder import Checkpoint, newest_checkpoint
from bapipe.training.data.samples_digest import samples_digest
from bapipe.training.job_facts import job_facts
from bapipe.training.train_config import TrainConfig
from bapipe.zoo.data.dataset import as_pipeline_dataset
from tests.multiprocess.fault_cases import plan_of, points, quiet
from tests.training.checkpoint.cases import go

CONFIG = TrainConfig(steps=5, seed=3)


def facts_of(
    plan: Plan, config: TrainConfig, data: Dataset[Any], resume_from: Checkpoint | None = None
) -> dict[str, str]:
    dataset = as_pipeline_dataset(data)
    return job_facts(plan, config, dataset, samples_digest(dataset), resume_from)


def test_each_difference_shows_in_its_own_fact(tmp_path: Path) -> None:
    plan, data = plan_of(quiet, (2,), (0, 1)), points()
    weights = [tmp_path / name for name in ("a", "b", "copy of a")]
    for path, content in zip(weights, (b"1", b"2", b"1"), strict=True):
        path.write_bytes(content)
    facts = facts_of(plan, CONFIG, data)
    assert facts_of(plan, replace(CONFIG, data="elsewhere", timeout_s=1.0), points()) == facts
    started = [facts_of(plan, replace(CONFIG, weights=path), data) for path in weights]
    assert started[0] == started[2]
    assert started[1].items() - started[0].items() == {("the file of `weights`", started[1]["the file of `weights`"])}
    kept = [facts_of(plan, replace(CONFIG, checkpoint=tmp_path / name), data) for name in ("a", "b")]
    assert kept[0] == kept[1]
    go(tmp_path / "one run", 2)
    go(tmp_path / "another", 2, seed=1)
    resumed = [newest_checkpoint(tmp_path / name) for name in ("one run", "another")]
    one_run, another = (facts_of(plan, CONFIG, data, checkpoint) for checkpoint in resumed)
    assert [what for what in facts if one_run[what] != another[what]] == ["the checkpoint to continue from"]
    other_data = torch.utils.data.TensorDataset(torch.zeros(50, 4), torch.arange(50))
    cases = {
        "the plan": facts_of(plan_of(quiet, (3,), (0, 1)), CONFIG, data),
        "the cpu profile": facts_of(msgspec.structs.replace(plan, profiles={"cpu": "5a" * 32}), CONFIG, data),
        "`seed`": facts_of(plan, replace(CONFIG, seed=4), data),
        "`optimizer_arguments`": facts_of(plan, replace(CONFIG, optimizer_arguments={"momentum": 0.5}), data),
        "the file of `weights`": started[0],
        "the folder of `checkpoint`": kept[0],
        "the data": facts_of(plan, CONFIG, other_data),
        "the checkpoint to continue from": facts_of(plan, CONFIG, data, resumed[0]),
    }
    for what, other in cases.items():
        assert {name for name in {**facts, **other} if facts.get(name) != other.get(name)} == {what}
    assert "torch" in facts
    assert facts["bapipe"] == version("bapipe")


def test_processes_that_made_the_same_arguments_are_of_one_job() -> None:
    def given(*, decay: float = 0.0) -> TrainConfig:
        """As each process makes it: functions and objects of its own, the arguments in whatever order."""
        arguments = {"activation": lambda x: x, "pairs": [object()], "width": 4}
        backwards = dict(reversed(arguments.items()))
        return replace(CONFIG, arguments=backwards if decay else arguments, optimizer_arguments={"weight_decay": decay})

    plan, data = plan_of(quiet, (2,), (0, 1)), points()
    facts, other = (facts_of(plan, config, data) for config in (given(), given(decay=0.1)))
    assert [what for what in facts if facts[what] != other[what]] == ["`optimizer_arguments`"]


def test_folders_may_be_given_as_texts() -> None:
    config = TrainConfig(steps=1, checkpoint="kept", weights="some.safetensors", tensorboard="board")  # type: ignore[arg-type]
    assert (config.checkpoint, config.weights, config.tensorboard) == (
        Path("kept"), Path("some.safetensors"), Path("board"),
    )  # fmt: skip
