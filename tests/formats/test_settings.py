"""How a model was computed goes with its profile and its plan, and a run that computes otherwise is refused."""

from random import Random
from typing import Any

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

import bapipe
from bapipe.errors import BapipeError, InvalidFile
from bapipe.formats import codec
from bapipe.formats.profile import ModelProfile
from bapipe.formats.settings import Settings, check_same, difference
from bapipe.planner import plan as planning
from tests.random_profiles import random_cluster, random_profile


def measured(kind: str = "a", **changes: object) -> ModelProfile:
    settings = replace(Settings(), **changes)
    profile = random_profile(Random(3), 4, kind=kind)
    return replace(profile, settings=settings, dtype=settings.dtype, optimizer=settings.optimizer)


def test_a_plan_has_the_settings_of_its_profile() -> None:
    profile = measured(threads=2, autocast="bfloat16")
    plan = bapipe.plan(profile, random_cluster(Random(1), 2), minibatch_size=4)
    assert plan.settings == profile.settings
    assert codec.decode(codec.encode(plan)) == plan
    assert codec.decode(codec.encode(profile)) == profile


def test_a_profile_without_settings_gives_a_plan_without_settings() -> None:
    plan = bapipe.plan(random_profile(Random(3), 4), random_cluster(Random(1), 2), minibatch_size=4)
    assert plan.settings is UNSET
    assert b'"settings"' not in codec.encode(plan)


def test_profiles_of_different_settings_make_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "solve_step_time", None)  # nothing is searched before
    with pytest.raises(BapipeError) as error:
        bapipe.plan([measured(), measured(kind="b", tf32=True)], random_cluster(Random(1), 2), minibatch_size=4)
    assert str(error.value) == (
        "the profile of a was measured with tf32 false, that of b with tf32 true: profile both with the same settings"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"autocast": "int8"}, "`autocast` is 'int8': want 'bfloat16' or 'float16' or None"),
        ({"threads": 0}, "`threads` is 0: want at least 1"),
        (
            {"optimizer": torch.optim.Adam},
            "`optimizer` is the class Adam: want str, such as 'sgd', 'sgd-momentum', 'adam', 'adamw'; did you mean 'adam'?",
        ),
        (
            {"optimizer": torch.optim.Adam([torch.zeros(1)])},
            "`optimizer` is an object of type Adam: want str, such as 'sgd', 'sgd-momentum', 'adam', 'adamw'",
        ),
        (
            {"dtype": torch.bfloat16},
            "`dtype` is torch.bfloat16: want str, such as 'float32', 'bfloat16'; did you mean 'bfloat16'?",
        ),
        (
            {"autocast": torch.float16},
            "`autocast` is torch.float16: want 'bfloat16' or 'float16' or None; did you mean 'float16'?",
        ),
        ({"threads": "4"}, "`threads` is '4': want int; did you mean 4?"),
        ({"tf32": 1}, "`tf32` is 1: want True or False; did you mean True?"),
    ],
)
def test_settings_of_another_type_or_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BapipeError) as error:
        Settings(**settings)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threads": 2}, ("threads 2", "threads 1")),
        ({"autocast": "bfloat16"}, ("autocast bfloat16", "no autocast")),
        ({"optimizer": "adam"}, ("optimizer adam", "optimizer sgd-momentum")),
        ({"dtype": "float64"}, ("dtype float64", "dtype float32")),
        ({"channels_last": True}, ("channels last true", "channels last false")),
    ],
)
def test_the_first_difference_in_words(changes: dict[str, object], words: tuple[str, str]) -> None:
    assert difference(replace(Settings(), **changes), Settings()) == words
    assert difference(Settings(), Settings()) is None
    with pytest.raises(BapipeError) as error:
        check_same(replace(Settings(), **changes), Settings())
    assert str(error.value) == (
        f"the plan is for a model that was measured with {words[0]}; this run computes with {words[1]}: profile with the "
        "settings of the run, and plan again"
    )


def test_a_run_refuses_the_plan_of_a_profile_with_other_settings() -> None:
    plan = bapipe.plan(measured(kind="cpu", dtype="float64"), 1, minibatch_size=4)
    with pytest.raises(BapipeError, match="measured with dtype float64; this run computes with dtype float32"):
        bapipe.run(plan, factory="bapipe.zoo.vgg:vgg16")


def test_a_run_refuses_more_threads_than_there_are_cores() -> None:
    plan = bapipe.plan(measured(kind="cpu", threads=10**6), 1, minibatch_size=4)
    with pytest.raises(
        BapipeError, match=r"^the plan uses 1000000 threads on each of 1 cpu devices and this machine has "
    ):
        bapipe.run(plan, factory="bapipe.zoo.vgg:vgg16")


def test_settings_and_profile_must_agree() -> None:
    with pytest.raises(InvalidFile, match="the settings name another dtype or optimizer than the profile"):
        replace(random_profile(Random(3), 4), settings=Settings(optimizer="adam"))
