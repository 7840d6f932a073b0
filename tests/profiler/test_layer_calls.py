"""Layers called one after another on a chain by hand."""

import torch
from torch import Tensor, nn

from bapipe.profiler.instrument import TrainingPass
from bapipe.profiler.layer_calls import callable_layers, run_layers, signature
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
