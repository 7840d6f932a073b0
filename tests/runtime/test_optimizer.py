"""Optimizers by name, per stage, and their state by the names of parameters."""

import pytest
import torch
from torch import nn, optim

from bapipe.errors import BapipeError
from bapipe.runtime.clock import CpuClock
from bapipe.runtime.optimizer import TORCH_OPTIMIZERS, StageOptimizers, optimizer_factory, sgd


def make(name: str, **arguments: object) -> optim.Optimizer:
    return optimizer_factory(name, 0.5, arguments)([nn.Parameter(torch.zeros(2, 2))])


def test_names_are_those_of_torch_in_any_case() -> None:
    assert {"sgd", "adam", "adamw", "rmsprop"} <= set(TORCH_OPTIMIZERS)
    assert not {"optimizer", "lbfgs"} & set(TORCH_OPTIMIZERS)
    assert type(make("ADAMW")) is optim.AdamW
    assert make("AdamW", weight_decay=0.25).defaults["weight_decay"] == 0.25
    assert make("adam").defaults["lr"] == 0.5


def test_sgd_has_momentum_unless_it_gets_arguments() -> None:
    assert make("sgd").defaults["momentum"] == 0.9
    assert make("sgd", nesterov=False).defaults["momentum"] == 0
    assert sgd()([nn.Parameter(torch.zeros(1))]).defaults["momentum"] == 0.9


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("adamm", {}, "torch.optim has no optimizer 'adamm'; did you mean 'adam'?"),
        ("adam", {"lr_decay": 1}, "adam cannot be made with lr=0.5 and lr_decay=1: "),
        ("sgd", {"momentum": -1}, "sgd cannot be made with lr=0.5 and momentum=-1: "),
    ],
)
def test_errors(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        optimizer_factory(name, 0.5, arguments)
    assert str(caught.value).startswith(message)


def stages() -> tuple[nn.Linear, nn.Linear, dict[str, nn.Parameter]]:
    """Two stages that share a weight, and their parameters by name."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return first, second, dict(first.named_parameters())


def test_a_shared_parameter_belongs_to_the_first_stage() -> None:
    first, second, _ = stages()
    made = StageOptimizers({0: first, 1: second}, sgd(), CpuClock())
    assert len(made.optimizers) == 1
    before = first.weight.detach().clone()
    first(torch.ones(1, 3)).sum().backward()
    made.step(1)
    assert torch.equal(first.weight, before)
    made.step(0)
    assert not torch.equal(first.weight, before)
    assert [stage for stage, _, _ in made.updates] == [1, 0]
    made.zero_grad()
    assert first.weight.grad is None
    assert made.updates == ()


def test_state_moves_to_other_stages_by_the_names_of_parameters() -> None:
    first, second, parameters = stages()
    adam = optimizer_factory("adam", 0.1, {})
    made = StageOptimizers({0: first, 1: second}, adam, CpuClock())
    first(torch.ones(1, 3)).sum().backward()
    made.step(0)
    state = made.state_tensors(parameters)
    assert set(state) == {f"{name}:{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")}
    assert made.state_bytes() == 2 * (9 + 3) * 4 + 2 * 4
    other, _, same_names = stages()
    restored = StageOptimizers({3: other}, adam, CpuClock())
    restored.load_state_tensors(state, same_names)
    loaded = restored.state_tensors(same_names)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
