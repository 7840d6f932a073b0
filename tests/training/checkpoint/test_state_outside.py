"""What checkpoints do not hold: a run says so."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError
from bapipe.runtime.pipeline import Pipeline
from bapipe.training.checkpoint.manifest import check_model, read_manifest
from bapipe.training.checkpoint.writer import full_state_dict
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.zoo.example import Example
from tests.multiprocess.fault_cases import plan_of, points
from tests.multiprocess.launch_cases import classifier
from tests.training.checkpoint.cases import only_rank


class Versioned(nn.Module):
    """A layer with extra state, an object by default."""

    def __init__(self, version: object = "three") -> None:
        super().__init__()
        self.linear, self.version = nn.Linear(4, 3), version

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result

    def get_extra_state(self) -> Any:
        return self.version

    def set_extra_state(self, state: Any) -> None:
        self.version = state


def versioned() -> Example:
    return classifier(nn.Sequential(Versioned()))


def test_a_model_with_extra_state_trains_without_checkpoints_only(tmp_path: Path) -> None:
    plan = plan_of(versioned, (), (0,))
    with only_rank():
        assert len(train(plan, versioned, points(), TrainConfig(steps=1)).losses) == 1
    with only_rank(), pytest.raises(BapipeError) as caught:
        train(plan, versioned, points(), TrainConfig(steps=1, checkpoint=tmp_path / "kept"))
    assert str(caught.value) == (
        "module '0' (Versioned) has extra state (get_extra_state), which checkpoints do not hold, so a run that resumes "
        "would not go on where it stopped: keep it in buffers, or train without `checkpoint`"
    )
    assert not (tmp_path / "kept").exists()


@pytest.mark.usefixtures("alone")
def test_a_state_dict_is_without_extra_state_also_of_tensors() -> None:
    example = classifier(nn.Sequential(Versioned(torch.ones(2))))
    pipeline = Pipeline(example.module, plan_of(lambda: example, (), (0,)), loss=example.loss, inputs=example.inputs)
    assert set(example.module.state_dict()) - set(pipeline.state_dict()) == {"0._extra_state"}


class Moving(nn.Module):
    """A layer that centres its input by a moving average; `mean` of another shape at first."""

    mean: Tensor
    num: Tensor
    sign: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(1), persistent=False)
        self.register_buffer("num", torch.zeros(()), persistent=False)
        self.register_buffer("sign", -torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.num += 1
        result: Tensor = self.linear((x - self.mean) * self.sign / self.num)
        return result


def moving() -> Example:
    torch.manual_seed(0)
    return classifier(nn.Sequential(Moving()))


def test_a_run_that_resumes_has_the_buffers_that_are_not_persistent(tmp_path: Path) -> None:
    def losses(folder: str, steps: int) -> tuple[float, ...]:
        config = TrainConfig(steps=steps, checkpoint=tmp_path / folder, resume=True)
        with only_rank():
            return train(plan_of(moving, (), (0,)), moving, points(), config).losses

    assert losses("resumed", 2) + losses("resumed", 4) == losses("alone", 4)
    newest = tmp_path / "resumed" / "step-000000004"
    manifest = read_manifest(newest)
    assert manifest.non_persistent is not msgspec.UNSET
    assert set(manifest.non_persistent) >= {"0.mean", "0.num"}
    assert set(full_state_dict(newest, read_manifest(newest))) == {
        "0.linear.weight",
        "0.linear.bias",
    }  # which is exported
    with pytest.raises(BapipeError, match=r"of another model: it has a buffer '0\.mean', which is not persistent$"):
        check_model(manifest, newest, manifest.tensors, {"0.num", "0.sign"})


class Counting(nn.Module):
    """A layer that counts its forwards, and draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num = nn.Linear(4, 3), 0
        self.generator, self.python = torch.Generator().manual_seed(1), Random(2)

    def forward(self, x: Tensor) -> Tensor:
        self.num += 1
        noise = torch.randn(x.shape, generator=self.generator) * self.python.random()
        result: Tensor = self.linear(x + noise / self.num)
        return result


class Centred(nn.Module):
    """A loss with a moving centre."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            self.centre.mul_(0.9).add_(output.mean(0))
        return nn.functional.cross_entropy(output - self.centre, target)


def counting() -> Example:
    return replace(classifier(nn.Sequential(Counting())), loss=Centred())


def test_what_changes_and_is_in_no_checkpoint_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def said(build: Any, checkpoint: Path | None) -> list[str]:
        caplog.clear()
        with only_rank():
            train(plan_of(build, (), (0,)), build, points(), TrainConfig(steps=3, checkpoint=checkpoint))
        return [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]

    assert said(counting, tmp_path / "a") == [
        "no checkpoint holds '0.num' and a random generator and buffer 'centre' of the loss, which a step changes: a run "
        "that resumes begins with the first value, so it differs from one that never stopped; keep such state in buffers "
        "of the model"
    ]
    assert said(counting, None) == []
    assert said(moving, tmp_path / "b") == []
