"""Which layers change their buffers while they train, whoever wrote them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bapipe.tracing.aliasing import changes_buffers
from bapipe.tracing.layers import trace


class Counted(nn.Linear):
    """A layer of one's own that counts its forwards."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.n.add_(1)
        return super().forward(x)


def hooked() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.register_buffer("n", torch.zeros(()))
    layer.register_forward_pre_hook(lambda module, _: module.n.add_(1) and None)
    return layer


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        (lambda: nn.BatchNorm1d(8), True),
        (lambda: nn.Sequential(nn.Linear(8, 8)), False),
        (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), False),
        (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), False),
        (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), True),
        (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), True),
        (Counted, True),
        (lambda: parametrizations.weight_norm(Counted()), True),
        (lambda: parametrizations.weight_norm(nn.BatchNorm1d(8)), True),
        (hooked, True),
    ],
)
def test_layers_that_change_their_buffers(made: Callable[[], nn.Module], changes: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), made())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    traced = trace(model, (torch.randn(3, 8),))
    model(torch.randn(3, 8))
    assert any(not torch.equal(buffer, before[name]) for name, buffer in model.named_buffers()) == changes
    assert [changes_buffers(traced, layer.name) for layer in traced.layers] == [False, changes]
