"""Options of training that are out of range, or lack another one."""

from pathlib import Path
from typing import Any

import pytest

import bapipe
from bapipe.errors import BapipeError
from bapipe.training.train_config import TrainConfig
from tests.builders import chain, devices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "5"}, "`steps` is '5': want int; did you mean 5?"),
        ({"steps": 1.5}, "`steps` is 1.5: want int"),
        ({"resume": True}, "`resume` needs `checkpoint`, the folder to continue from"),
        ({"replan": True}, "`replan` needs `checkpoint`, the folder to continue from"),
        ({"keep": 3}, "`keep` needs `checkpoint`, the folder for checkpoints: else none is written"),
        (
            {"checkpoint_every": 1},
            "`checkpoint_every` needs `checkpoint`, the folder for checkpoints: else none is written",
        ),
        ({"evaluate_samples": 5}, "`evaluate_samples` needs `evaluate_every`, the steps between two evaluations"),
        ({"timeout_s": 0}, "`timeout_s` is 0: want more than 0"),
        ({"timeout_s": -1.5}, "`timeout_s` is -1.5: want more than 0"),
        ({"timeout_s": float("nan")}, "`timeout_s` is nan: want more than 0"),
        ({"timeout_s": float("inf")}, "`timeout_s` is inf: want at most 1000000000"),
        ({"buckets": 0}, "`buckets` is 0: want at least 1"),
        ({"seed": 2**70}, f"`seed` is {2**70}: want at most {2**63 - 1}"),
        ({"weights": 5}, "`weights` is 5: want Path or None"),
        ({"learning_rate": -1.0}, "`learning_rate` is -1.0: want at least 0"),
        ({"learning_rate": float("nan")}, "`learning_rate` is nan: want at least 0"),
        (
            {"without": "cpu0", "replan": True, "checkpoint": "kept"},
            "`without` is 'cpu0': want a list of str",
        ),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        TrainConfig(**options)
    assert str(caught.value) == message


def test_profiles_that_a_run_does_not_use_are_refused() -> None:
    profile = chain([1, 2])
    plan = bapipe.plan(profile, devices(2), minibatch_size=4)
    with pytest.raises(BapipeError) as caught:
        bapipe.run(plan, profiles=profile)
    assert str(caught.value) == "`profiles` goes with `replan`: a plan runs without its profile"


def test_a_hundred_steps_are_between_checkpoints_and_three_are_kept_unless_others_are_asked_for() -> None:
    config = TrainConfig(steps=250, checkpoint=Path("kept"))
    assert [steps for steps in range(1, 251) if config.checkpoint_after(steps)] == [100, 200, 250]
    assert config.num_kept == 3
    config = TrainConfig(steps=5, checkpoint=Path("kept"), checkpoint_every=2, keep=1)
    assert [steps for steps in range(1, 6) if config.checkpoint_after(steps)] == [2, 4, 5]
    assert config.num_kept == 1
