"""Layers whose forward depends on earlier ones are found, wherever they keep what they read; others are not."""

import pytest
import torch
from torch import Tensor, nn

from bapipe.equivalence.check import example_microbatches
from bapipe.equivalence.earlier_forwards import layers_that_read_earlier_forwards
from bapipe.tracing.layers import trace
from tests.models import odd_modules
from tests.models.odd_modules import WIDTH, Body, nested

X = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Overwritten(Body):
    """Keeps a value that it reads in the same forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH, dtype=torch.float64))
        self.last: Tensor

    def odd(self, y: Tensor) -> Tensor:
        self.last.copy_(y.detach()[0])
        return y + self.last


class TurnsNaN(Body):
    """Gives 0 in its first forward, and NaN in its second."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(1, dtype=torch.float64))
        self.forwards: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return 0 * super().forward(x) / (2 - self.forwards)


class Renormalisation(nn.BatchNorm1d):
    """Batch norm that will normalise by its running statistics, after some thousand forwards with those of a batch."""

    def forward(self, y: Tensor) -> Tensor:
        by_batch = super().forward(y)
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        return by_batch if self.num_batches_tracked < 5_000 else y - self.running_mean


class Activated(nn.BatchNorm1d):
    """Batch norm with a forward of its own, which reads no running statistics."""

    def forward(self, y: Tensor) -> Tensor:
        return super().forward(y).tanh()


class Complex(nn.Module):
    """Hands on complex numbers, which need gradients, and their conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4, dtype=torch.complex128), nn.Linear(4, 3, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x.to(torch.complex128)).conj())
        return y.abs()


def found(module: nn.Module) -> set[str]:
    torch.manual_seed(0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    microbatches = example_microbatches([X], torch.zeros(2), [2, 2], torch.device("cpu"))
    layers = layers_that_read_earlier_forwards(trace(module, [X]), microbatches)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    return set(layers)


@pytest.mark.parametrize(
    ("body", "layers"),
    [
        ("Counter", {"2"}),
        ("KeptState", {"2"}),
        ("KeptTensor", {"2"}),
        ("KeptListOfTensors", {"2"}),
        ("KeptObject", {"2"}),
        ("Codebook", {"2"}),
        ("ClampedWeight", {"2"}),  # of the layer that ran before
        ("Renormalised", {"2"}),
        ("LimitedNorms", {"2.kinds"}),
    ],
)
def test_what_the_next_forward_reads_is_found(body: str, layers: set[str]) -> None:
    assert found(nested(getattr(odd_modules, body))) == layers


@pytest.mark.parametrize(
    "body", ["BatchNormalised", "SideTerm", "Cache", "ClampedWithoutLayer", "RecordingHook", "WeightNorm"]
)
def test_what_no_forward_reads_is_no_harm(body: str) -> None:
    assert not found(nested(getattr(odd_modules, body)))


def test_complex_values_are_compared() -> None:
    assert not found(Complex())


def test_values_that_are_overwritten_before_they_are_read_are_no_harm() -> None:
    assert not found(nested(Overwritten))


def test_a_value_that_turns_nan_is_found() -> None:
    assert found(nested(TurnsNaN)) == {"2"}


@pytest.mark.parametrize(("norm", "layers"), [(Renormalisation, {"1"}), (Activated, set())])
def test_running_statistics_that_a_later_forward_will_read_are_found(norm: type[nn.Module], layers: set[str]) -> None:
    assert found(nn.Sequential(nn.Linear(6, 6), norm(6)).double()) == layers
