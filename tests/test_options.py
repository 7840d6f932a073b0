"""Options as an object or as keyword arguments."""

from dataclasses import dataclass
from typing import Any

import pytest

import bapipe
from bapipe.options import options_from
from bapipe.planner.inputs.options import PlanOptions
from tests.builders import chain, devices


@dataclass(frozen=True, kw_only=True)
class Options:
    size: int
    verbose: bool = False


def test_both_spellings_give_the_same_options() -> None:
    assert options_from(Options, None, {"size": 3}) == Options(size=3)
    assert options_from(Options, Options(size=3, verbose=True), {}) == Options(size=3, verbose=True)


@pytest.mark.parametrize(
    ("given", "keywords", "message"),
    [
        (None, {"size": 1, "verbos": True}, "unknown option 'verbos'; did you mean 'verbose'?"),
        (None, {"size": 1, "x": 1}, "unknown option 'x'; choose from size, verbose"),
        ({"size": 1}, {}, "{'size': 1} is no Options: give Options(...) or keyword arguments"),
        (Options(size=1), {"size": 1}, "give either Options(...) or keyword arguments, not both: size"),
    ],
)
def test_wrong_options_are_named(given: Any, keywords: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        options_from(Options, given, keywords)
    assert str(caught.value) == message


def test_a_missing_option_is_named() -> None:
    with pytest.raises(TypeError, match="size"):
        options_from(Options, None, {})


def test_plan_takes_both_spellings() -> None:
    profile = chain([1, 2])
    by_object = bapipe.plan(profile, devices(2), PlanOptions(minibatch_size=4, num_stages=2))
    assert bapipe.plan(profile, devices(2), minibatch_size=4, num_stages=2) == by_object
    with pytest.raises(TypeError, match="unknown option 'num_stage'; did you mean 'num_stages'"):
        bapipe.plan(profile, devices(2), minibatch_size=4, num_stage=2)
