"""Layers called one after another on a chain by hand."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, fx, nn

from bapipe.profiler.instrument import TrainingPass
from bapipe.profiler.layer_calls import CallableLayer, callable_layers, run_layers, signature
from bapipe.torch_device import CPU
from bapipe.torch_private.tensors import storage_key
from bapipe.tracing.layers import trace


def training_pass() -> TrainingPass:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    inputs = (torch.ones(3, 2),)
    return TrainingPass(
        model=trace(module, inputs), loss=nn.functional.mse_loss, inputs=inputs, target=torch.ones(3, 2)
    )


def test_layers_run_in_order_and_the_loss_is_last() -> None:
    measured = training_pass()
    calls = list(run_layers(measured, list(callable_layers(measured))))
    assert [call.layer.name for call in calls] == ["0", "1", "2", "loss"]
    assert torch.equal(calls[1].inputs[0], calls[0].outputs[0])
    assert torch.equal(calls[3].outputs[0], measured.model_loss())


class Force(nn.Module):
    """The gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)[0]


class Descent(nn.Module):
    """Adds to an activation the derivative of an energy by it: 2 w² x, for weights that are w times the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.energy = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        nn.init.eye_(self.energy.weight).data.mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x + torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)[0]


def test_a_layer_may_take_derivatives_by_an_activation_that_another_layer_makes() -> None:
    x = torch.ones(3, 2)
    measured = TrainingPass(model=trace(Descent(), (x,)), loss=nn.functional.mse_loss, inputs=(x,), target=x)
    calls = list(run_layers(measured, list(callable_layers(measured))))
    assert [call.layer.name for call in calls] == ["a", "energy", "loss"]
    torch.testing.assert_close(calls[1].outputs[0], (1 + 2 * 3**2) * calls[0].outputs[0])
    assert not calls[1].outputs[0].requires_grad


def test_a_forward_may_compute_gradients_itself() -> None:
    module, x = nn.Sequential(Force(), nn.Linear(2, 2)), torch.ones(3, 2)
    model = trace(module, (x,), leaf_modules=["0"])
    measured = TrainingPass(model=model, loss=nn.functional.mse_loss, inputs=(x,), target=torch.ones(3, 2))
    calls = list(run_layers(measured, list(callable_layers(measured))))
    assert torch.equal(calls[-1].outputs[0], measured.model_loss())
    assert not any(tensor.requires_grad for call in calls for tensor in call.outputs)


def test_a_tensor_is_freed_after_its_last_use() -> None:
    measured = training_pass()
    calls = list(run_layers(measured, list(callable_layers(measured))))
    assert storage_key(calls[0].outputs[0]) in calls[1].storages_before
    assert storage_key(calls[0].outputs[0]) not in calls[2].storages_before


def test_equal_signatures_mean_equal_code_shapes_and_state() -> None:
    def of(module: nn.Module, x: Tensor) -> object:
        measured = TrainingPass(
            model=trace(nn.Sequential(module), (x,)), loss=nn.functional.mse_loss, inputs=(x,), target=x
        )
        return signature(next(callable_layers(measured)).module, [x])

    x = torch.ones(3, 4)
    assert of(nn.Linear(4, 4), x) == of(nn.Linear(4, 4), x)
    assert of(nn.Linear(4, 4), x) != of(nn.Linear(4, 4), torch.ones(5, 4))
    assert of(nn.Linear(4, 4), x) != of(nn.Linear(4, 4, bias=False), x)
    assert of(nn.LeakyReLU(0.1), x) != of(nn.LeakyReLU(0.2), x)


class Masked(nn.Module):
    """A layer with parameters, and one with buffers, a constant, and a tensor that is made on a device by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)
        self.shift = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.norm(self.linear(x)) + self.shift + torch.zeros(x.shape[0], 2, device=next(self.parameters()).device)
        )


def test_a_layer_runs_on_the_device_of_the_batch_with_all_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for another one; torch does not give a tensor memory there, so the moves are noted."""
    module, x = Masked(), torch.ones(3, 2)
    model, meta = trace(module, (x,)), torch.device("meta")
    target = torch.ones(3, 2, device=meta)
    measured = TrainingPass(model=model, loss=nn.functional.mse_loss, inputs=(x.to(meta),), target=target)
    layers = list(callable_layers(measured))
    made = [node.kwargs["device"] for layer in layers[:-1] for node in zeros_of(layer)]
    assert made == [meta]
    moves: list[tuple[int, torch.device]] = []

    def to(tensor: Tensor, place: torch.device) -> Tensor:
        moves.append((tensor.numel(), place))
        return tensor

    held = [*module.norm.buffers()]
    monkeypatch.setattr(TrainingPass, "autocast_context", lambda _: nullcontext())  # torch has none for meta
    monkeypatch.setattr(CallableLayer, "run", lambda layer, _: [torch.zeros(3, 2)] * len(layer.outputs))
    monkeypatch.setattr(Tensor, "to", to)
    assert [call.layer.name for call in run_layers(measured, layers)] == ["linear", "norm", "loss"]
    there = [size for size, place in moves if place == meta]
    assert sorted(there) == [1, 2, 2, 2, 2, 4]  # number of batches; bias, mean, variance, the constant; weight
    assert [size for size, place in moves if place == CPU] == there
    assert [*map(id, module.norm.buffers())] == [*map(id, held)]


def zeros_of(layer: CallableLayer) -> list[fx.Node]:
    assert isinstance(layer.module, fx.GraphModule)
    return [node for node in layer.module.graph.nodes if node.target is torch.zeros]
