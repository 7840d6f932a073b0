"""Backwards find what the forward of their micro-batch has left in modules, as if no other had run since."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.runtime.pipeline import Pipeline
from tests.multiprocess.runtime_cases import make_plan

NUM_MICROBATCHES, NUM_STEPS = 3, 3


class RandomTwice(torch.autograd.Function):
    """Keeps no activations: its backward runs the block once more, with the random state that the module has kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: "Reversible") -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        block.random_state = torch.get_rng_state()
        return block.net(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.block.random_state)
            y = ctx.block.net(x)
        torch.autograd.backward(y, grads[0])
        return x.grad, None


class Reversible(nn.Module):
    """Dropout in a block whose backward draws from an attribute."""

    random_state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + RandomTwice.apply(x, self)


class ScaledTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Projection") -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer.linear(x) * layer.scale[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer.linear(x) * ctx.layer.scale[0]
        torch.autograd.backward(y, grads[0])
        return x.grad, None


class Projection(nn.Module):
    """A buffer that a backward reads, and that only one forward changes, in the middle of a later step."""

    def __init__(self, is_replaced: bool = False) -> None:
        super().__init__()
        self.linear, self.is_replaced, self.num_calls = nn.Linear(4, 4), is_replaced, 0
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == NUM_MICROBATCHES + 2:
            if self.is_replaced:
                self.scale = torch.full((2,), 3.0)
            else:
                self.scale.fill_(3.0)
        return ScaledTwice.apply(x, self)


class HookOfTensor(nn.Module):
    """A hook of a tensor that scales gradients by what the forward keeps."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.scale = x.detach().abs().mean()
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.scale)
        return y


class HooksOfModule(nn.Module):
    """Hooks of a module of torch's, which keep what they share in the module around it; and count backwards."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_backwards = nn.Linear(4, 4), 0
        self.linear.register_forward_hook(self.keep)
        self.linear.register_full_backward_hook(self.use)

    def keep(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.scale = args[0].detach().abs().mean()

    def use(self, module: nn.Module, grads: Any, _: Any) -> Any:
        self.num_backwards += 1
        return (grads[0] * self.scale * self.num_backwards,)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def model_of(block: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), block(), nn.Linear(4, 4)).double()


X, Y = torch.randn(NUM_STEPS, 6, 4).double(), torch.randn(NUM_STEPS, 6, 4).double()

ORDERS = {
    "forwards first": "0F0 0F1 0F2 1F0 1F1 1F2 1B0 0B0 1B1 0B1 1B2 0B2",
    "split": "0F0 1F0 0F1 1I0 1F1 0I0 0F2 1I1 1W0 1F2 0W0 0I1 1I2 0I2 1W1 1W2 0W1 0W2",
}


def pipeline_of(module: nn.Module, order: str, recompute: tuple[int, ...], *, check: bool) -> Pipeline:
    """Two stages on one device; weights stay."""
    plan = make_plan(["0", "1", "2"], (2,), (0, 0), [ORDERS[order].split()], 2, NUM_MICROBATCHES, recompute)
    return Pipeline(
        module,
        plan,
        loss=mse_loss,
        inputs=(X[0, :2],),
        check=check,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recompute", [(), (0, 1)])
@pytest.mark.parametrize("block", [Projection, lambda: Projection(is_replaced=True), HookOfTensor, HooksOfModule])
def test_gradients_are_those_of_one_process(
    order: str, recompute: tuple[int, ...], block: Callable[[], nn.Module]
) -> None:
    pipeline, reference = pipeline_of(model_of(block), order, recompute, check=True), model_of(block)
    for x, y in zip(X, Y, strict=True):
        pipeline.step(x, target=y)
        reference.zero_grad()
        for microbatch in range(NUM_MICROBATCHES):
            own = slice(2 * microbatch, 2 * microbatch + 2)
            (mse_loss(reference(x[own]), y[own]) / NUM_MICROBATCHES).backward()
        for name, parameter in pipeline.named_parameters().items():
            torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, msg=name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recompute", [(), (0, 1)])
def test_gradients_are_those_of_the_random_numbers_that_the_forward_drew(
    order: str, recompute: tuple[int, ...]
) -> None:
    def loss_at(distance: float) -> tuple[float, float]:
        """The loss with all parameters moved by a distance, and its derivative by that."""
        module = model_of(Reversible)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(distance)
        pipeline = pipeline_of(module, order, recompute, check=False)
        loss = pipeline.step(X[0], target=Y[0])
        assert loss is not None
        return loss, sum(float(p.grad.sum()) for p in pipeline.named_parameters().values() if p.grad is not None)

    distance = 1e-5
    by_differences = (loss_at(distance)[0] - loss_at(-distance)[0]) / (2 * distance)
    assert loss_at(0.0)[1] == pytest.approx(by_differences, rel=1e-6)
