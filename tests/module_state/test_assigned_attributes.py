"""Which attributes forwards assign, by their code."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import nn

from bapipe.module_state.assigned_attributes import assigned_names, assigns_attributes, may_be_inlined, names_in_forward


class Base(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.of_base = x
        return self.helper(x) * self.scale

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def never_called(self) -> None:
        self.other = 1

    @property
    def scale(self) -> int:
        self.of_property = 2
        return 2


class Derived(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    @torch.no_grad()
    def helper(self, x: torch.Tensor) -> torch.Tensor:
        self.of_helper = x
        return self.helper(x) if len(x) > 3 else x  # calls itself, which must not go on for ever


def noting(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(forward)
    def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.of_decorator = x
        return forward(module, x)

    return call


class Decorated(nn.Module):
    @noting
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.of_forward = x
        return x


class Sets(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("first", "last"):
            setattr(self, name, x)
        return x


class Holds(nn.Module):
    held: dict[str, torch.Tensor]
    other: dict[str, torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held["first"] = x
        x[0] = self.other["last"]
        return x


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0] = 1
        return y


class HoldsByKey(nn.Module):
    """Of its attributes, those that are dictionaries hold what it assigns by a key."""

    def __init__(self) -> None:
        super().__init__()
        self.by_number: dict[int, torch.Tensor] = {}
        self.by_text: dict[str, torch.Tensor] = {}
        self.by_call: dict[str, torch.Tensor] = {}
        self.read: dict[int, torch.Tensor] = {}
        self.key, self.tensor = "key", torch.zeros(3)

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        self.by_number[number] = x
        self.by_text[f"{self.key}.{number + 1}"] = self.read[number]
        self.by_call[str(self.key).lower()] = x
        self.tensor[number] = x[0]
        return x


def test_attributes_are_found_in_the_methods_that_a_forward_may_call() -> None:
    assert assigned_names(Base()) == {"of_base", "of_property"}
    assert assigned_names(Derived()) == {"of_base", "of_property", "of_helper"}
    assert {"super", "helper", "scale", "of_base"} <= names_in_forward(Derived())


def test_attributes_are_found_in_decorators_and_what_they_wrap() -> None:
    assert assigned_names(Decorated()) == {"of_decorator", "of_forward"}


def test_modules_without_children_of_ones_own_may_be_inlined_if_they_assign() -> None:
    made = [Derived(), Sets(), Holds(), Plain(), nn.Linear(2, 2), nn.BatchNorm1d(2)]
    assert [assigns_attributes(module) for module in made] == [True, True, True, False, False, False]
    assert [may_be_inlined(module) for module in made] == [True, True, True, False, False, False]
    assert assigned_names(Holds()) == {"held"}
    assert assigned_names(HoldsByKey()) == {"by_number", "by_text", "by_call"}
    with_child = Derived()
    with_child.child = nn.Identity()
    assert not may_be_inlined(with_child)
