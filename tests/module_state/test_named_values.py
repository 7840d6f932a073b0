"""Plain values that forwards name, and which of them have changed."""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.module_state.named_values import GONE, Place, named_values

SETTINGS: dict[str, Any] = {"scale": 0.1}
MODE = "a"
UNNAMED = 1


@dataclass
class Config:
    gain: float = 0.1
    unnamed: float = 0.1

    def doubled(self) -> float:
        return 2 * self.hidden

    hidden: float = 0.1


def helper(x: Tensor) -> Tensor:
    return x if MODE == "a" else x * SETTINGS["scale"]


def reading(factor: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    """Returns a function that reads a variable of a closure, and one that sets it."""

    def read(x: Tensor) -> Tensor:
        return x * factor

    def write(value: float) -> None:
        nonlocal factor
        factor = value

    return read, write


READ, WRITE = reading(0.1)


class Named(nn.Module):
    kind = "class"

    def __init__(self) -> None:
        super().__init__()
        self.number, self.flag, self.which, self.missing = 0.1, False, "a", None
        self.unnamed = "a"
        self.config, self.table, self.steps = Config(), {"k": {"deep": 1}}, [1, 2]
        self.space = types.SimpleNamespace(k=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.flag or self.which == "b" or self.missing is not None or self.kind != "class":
            x = -x
        x = x * self.number * self.config.gain * self.config.doubled() * self.space.k
        return self.inner(READ(helper(x)))

    def inner(self, x: Tensor) -> Tensor:
        return x * self.table["k"]["deep"] * self.steps[0]


def changes_of(places: list[Place]) -> list[str]:
    return [place.name(key) for place in places if not place.is_unchanged() for key, _ in place.changed()]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda one: setattr(one, "number", 0.2), "the attribute 'part.number'"),
        (lambda one: setattr(one, "flag", True), "the attribute 'part.flag'"),
        (lambda one: setattr(one, "which", "b"), "the attribute 'part.which'"),
        (lambda one: setattr(one, "missing", torch.ones(2)), "the attribute 'part.missing'"),
        (lambda one: setattr(one.config, "gain", 0.2), "the attribute 'part.config.gain'"),
        (lambda one: setattr(one.config, "hidden", 0.2), "the attribute 'part.config.hidden'"),
        (lambda one: setattr(one, "config", Config(gain=0.2)), "the attribute 'part.config'"),
        (lambda one: setattr(one.space, "k", 0.2), "the attribute 'part.space.k'"),
        (lambda one: one.table["k"].update(deep=2), "the attribute 'part.table['k']['deep']'"),
        (lambda one: one.table.clear(), "the attribute 'part.table['k']'"),
        (lambda one: one.steps.__setitem__(0, 3), "the attribute 'part.steps[0]'"),
        (lambda one: WRITE(0.2), "the variable 'factor'"),
    ],
)
def test_what_a_script_sets_is_found(change: Callable[[Named], object], name: str) -> None:
    module = Named()
    places = named_values({"part": module})
    assert changes_of(places) == []
    change(module)
    try:
        assert changes_of(places) == [name]
    finally:
        WRITE(0.1)


def test_globals_and_classes_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    places = named_values({"": Named(), "same": Named()})
    monkeypatch.setitem(SETTINGS, "scale", 0.2)
    monkeypatch.setattr(f"{__name__}.MODE", "b")
    monkeypatch.setattr(Named, "kind", "other")
    found = ["the attribute 'Named.kind'", "the global variable 'MODE'", "the global variable 'SETTINGS['scale']'"]
    assert sorted(changes_of(places)) == found


def test_what_no_forward_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Named()
    places = named_values({"": module})
    monkeypatch.setattr(f"{__name__}.UNNAMED", 2)
    module.unnamed, module.config.unnamed = "b", 0.2
    assert changes_of(places) == []


def test_a_value_that_is_gone_is_changed_until_it_is_left_out() -> None:
    module = Named()
    place = next(place for place in named_values({"": module}) if "which" in place.values)
    del module.which
    assert not place.is_unchanged()
    assert place.changed() == [("which", GONE)]
    place.forget("which")
    assert place.is_unchanged()
