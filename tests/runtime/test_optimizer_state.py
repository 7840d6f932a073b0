"""The state of optimizers that is more than tensors of parameters, and states of several processes."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim

from bapipe.errors import BapipeError
from bapipe.runtime.optimizer_state import joined, load_state, state_of


class Scripted(optim.Optimizer):
    """An optimizer whose first step keeps given values in a parameter's state, and in its group."""

    def __init__(self, parameters: Iterable[nn.Parameter], state: dict[str, Any], group: dict[str, Any]) -> None:
        super().__init__(parameters, {"lr": 0.5, **group})
        self.to_keep = state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(self.to_keep)


class Around(optim.Optimizer):
    """An optimizer that another one updates for, as of look-ahead: its state is the other one's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.inner = optim.SGD(parameters, lr=0.5, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class AroundWithBoth(Around):
    """One that keeps a state of its own, too."""

    def state_dict(self) -> dict[str, Any]:
        return {**optim.Optimizer.state_dict(self), "inner": self.inner.state_dict()}


def trained(steps: int, optimizer: optim.Optimizer, parameter: nn.Parameter) -> None:
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.mark.parametrize(
    ("state", "what"),
    [({"factors": [torch.ones(2)]}, "a list as 'factors'"), ({"kept": {"a": 1.0}}, "a dict as 'kept'")],
)
def test_what_is_no_tensor_or_number_is_refused(state: dict[str, Any], what: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = Scripted([parameter], state, {})
    trained(1, optimizer, parameter)
    with pytest.raises(BapipeError, match=f"Scripted keeps {what} of a parameter: only tensors and numbers"):
        state_of([optimizer], {"weight": parameter})


def test_what_is_empty_and_numbers_of_a_group_are_kept() -> None:
    state, group = {"step": 3, "none": None}, {"history": [1.0, 2.0], "betas": (0.5, 0.75), "mode": "a"}
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = Scripted([parameter], state, group)
    trained(1, optimizer, parameter)
    saved = state_of([optimizer], {"weight": parameter})
    assert saved["numbers"] == {"weight:step": 3}
    again = Scripted([parameter], {}, {"history": [], "betas": (0.0, 0.0), "mode": "b"})
    load_state([again], saved, {"weight": parameter})
    (loaded,) = again.param_groups
    assert (loaded["history"], loaded["betas"], loaded["mode"]) == ([1.0, 2.0], (0.5, 0.75), "b")


def test_an_optimizer_around_another_one_goes_on_with_its_momentum() -> None:
    whole, first, second = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    trained(4, optim.SGD([whole], lr=0.5, momentum=0.9), whole)
    optimizer = Around([first])
    trained(2, optimizer, first)
    with torch.no_grad():
        second.copy_(first)
    again = Around([second])
    load_state([again], state_of([optimizer], {"weight": first}), {"weight": second})
    trained(2, again, second)
    assert torch.equal(whole, second)


class AroundWithList(Around):
    """One whose state is the list of those of all that are inside it."""

    def state_dict(self) -> Any:
        return [self.inner.state_dict()]


def test_one_with_a_state_of_its_own_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer, named = AroundWithBoth([parameter]), {"weight": parameter}
    with pytest.raises(BapipeError, match=r"AroundWithList keeps a list as its `state_dict\(\)`: only tensors"):
        state_of([AroundWithList([parameter])], named)
    with pytest.raises(BapipeError, match=r"AroundWithBoth keeps 'inner' in its `state_dict\(\)`: only tensors"):
        state_of([optimizer], named)
    with pytest.raises(BapipeError, match="AroundWithBoth keeps 'inner'"):
        load_state([optimizer], state_of([optim.SGD([parameter])], named), named)


def test_rates_of_all_processes_are_restored() -> None:
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in ("first", "second")}
    states = [
        state_of([optim.SGD([parameter], lr=rate)], {name: parameter})
        for rate, (name, parameter) in zip((0.25, 0.125), parameters.items(), strict=True)
    ]
    for name, parameter, rate in zip(parameters, parameters.values(), (0.25, 0.125), strict=True):
        restored = optim.SGD([parameter], lr=1.0)
        load_state([restored], joined(states), {name: parameter})
        assert restored.param_groups[0]["lr"] == rate


def test_no_state_is_refused() -> None:
    with pytest.raises(BapipeError, match="there is no state to load"):
        joined([])
