"""What checkpoints do not hold: a run says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.train import train
from bapipe.runtime.train_config import TrainConfig
from bapipe.zoo.example import Example
from tests.multiprocess.fault_cases import plan_of, points
from tests.multiprocess.launch_cases import classifier
from tests.runtime.checkpoint.cases import only_rank


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
