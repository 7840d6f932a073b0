"""I and W for torch before 2.13 give the gradients of the whole backward; here with the installed torch."""

import pytest
import torch
from torch import Tensor, nn

from bapipe.torch_private.older import stage_backward_input
from bapipe.torch_private.split_backward import stage_backward_weight


class SeveralOutputs(nn.Module):
    """W begins at an operator with several outputs, whose gradients differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = (self.first(x) * self.second.bias).chunk(3, dim=-1)
        return (one * two.exp() + three**2) @ self.second.weight[:2]


class OneLeadsToAnother(nn.Module):
    """A weight is used twice, in one operator that leads to the other: W begins at both."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(x).tanh())


class Unused(nn.Module):
    """One of two inputs and one weight are used in neither output."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), x.detach()


@pytest.mark.parametrize("module", [SeveralOutputs(), OneLeadsToAnother(), Unused()], ids=lambda m: type(m).__name__)
def test_both_parts_give_the_gradients_of_the_whole_backward(module: nn.Module) -> None:
    module = module.double()

    def run() -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.rand(3, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2)]
        found = module(*inputs) if isinstance(module, Unused) else module(inputs[0] * inputs[1])
        outputs = list(found) if isinstance(found, tuple) else [found]
        grads = [torch.rand(o.shape, dtype=o.dtype, generator=generator) if o.requires_grad else None for o in outputs]
        return inputs, outputs, grads

    inputs, outputs, grads = run()
    torch.autograd.backward(outputs[:1], grads[:1])
    want = [value.grad for value in (*inputs, *module.parameters())]
    module.zero_grad()

    inputs, outputs, grads = run()
    found, groups = stage_backward_input(outputs, grads, inputs, module.parameters())
    assert all(parameter.grad is None for parameter in module.parameters())
    stage_backward_weight(module.parameters(), groups)
    torch.testing.assert_close([*found, *(parameter.grad for parameter in module.parameters())], want)
    torch.testing.assert_close([value.grad for value in inputs], list(found))
