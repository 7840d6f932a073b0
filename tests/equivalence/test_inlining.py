"""Modules without children whose calls read each other's attributes are inlined, if that gives the original's results."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.equivalence.check import Equivalence, example_microbatches
from bapipe.equivalence.choose_layers import trace_checked
from bapipe.errors import InvalidModel
from bapipe.torch_device import CPU
from bapipe.tracing.layers import granularity, trace
from bapipe.tracing.model import TracedModel
from tests.models.reversible_norm import HORIZON, LAYERS, LENGTH, NUM_CHANNELS, Forecaster, ReversibleNorm

X, TARGET = torch.randn(2, LENGTH, NUM_CHANNELS), torch.randn(2, HORIZON, NUM_CHANNELS)


def norm_of(kind: type[ReversibleNorm] = ReversibleNorm) -> ReversibleNorm:
    return kind(affine=True, subtract_last=False)


def checked(module: nn.Module, leaf_modules: Sequence[str] = ()) -> TracedModel:
    """Returns the layers that are found for a module, which is equal to the original then, and stays as it was."""
    before = [dict(vars(part)) for part in module.modules()]
    microbatches = example_microbatches([X], TARGET, (2, 2, 3), CPU)
    model, result = trace_checked(module, [X], mse_loss, microbatches, leaf_modules=leaf_modules, max_size=3)
    assert isinstance(result, Equivalence), result
    assert [dict(vars(part)) for part in module.modules()] == before
    return model


def names(model: TracedModel) -> list[str]:
    return [layer.name for layer in model.layers]


@pytest.mark.parametrize("follows_sizes", [False, True])
@pytest.mark.parametrize("stale", ["none yet", "None", "of another forward"])
def test_a_norm_that_keeps_statistics_is_inlined(stale: str, follows_sizes: bool) -> None:
    module = Forecaster(norm_of(), follows_sizes=follows_sizes)
    if stale == "None":
        vars(module.norm).update(center=None, deviation=None)
    if stale == "of another forward":
        with torch.no_grad():
            module(X)
    model = checked(module)
    assert names(model) == LAYERS
    assert model.inlined == {"norm"}
    assert not model.leaf_reasons


@pytest.mark.parametrize("follows_sizes", [False, True])
def test_a_plans_layers_tell_what_was_inlined(follows_sizes: bool) -> None:
    module = Forecaster(norm_of(), follows_sizes=follows_sizes)
    leaf_modules, inlined, operator_layers = granularity(module, LAYERS)
    assert (leaf_modules, inlined, operator_layers) == ([], ["norm"], False)
    assert names(trace(module, [X], inlined=inlined)) == LAYERS
    called = [LAYERS[0], "norm", *LAYERS[1:], "norm#2"]
    assert granularity(module, called) == ([], [], False)
    assert names(trace(module, [X])) == called


class Centering(nn.Module):
    """Keeps the mean in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor, *, back: bool) -> Tensor:
        if back:
            return x + self.kept["mean"]
        self.kept["mean"] = x.mean(1, keepdim=True)
        return x - self.kept["mean"]


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center, self.a, self.b = Centering(), nn.Linear(NUM_CHANNELS, 4), nn.Linear(4, NUM_CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.center(self.b(self.a(self.center(x, back=False))), back=True)
        return y[:, :HORIZON]


def test_a_norm_that_keeps_statistics_in_a_dictionary_is_inlined() -> None:
    module = Centered()
    model = checked(module)
    assert names(model) == ["a", "b"]
    assert model.inlined == {"center"}
    assert not module.center.kept


class Outer(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.last = model, nn.Linear(NUM_CHANNELS, NUM_CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.model(x))
        return y


class Counting(ReversibleNorm):
    """Counts its calls, which the operators inside it do not."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls = 0

    def forward(self, x: Tensor, mode: str) -> Tensor:
        self.calls += 1
        return super().forward(x, mode)


class Averaging(ReversibleNorm):
    """Keeps what it has seen in all forwards."""

    seen: Tensor | None = None

    def _keep_statistics(self, x: Tensor) -> None:
        super()._keep_statistics(x)
        self.seen = self.center.mean() if self.seen is None else 0.5 * self.seen + 0.5 * self.center.mean()
        self.center = self.center + self.seen


@pytest.mark.parametrize("kind", [Counting, Averaging])
@pytest.mark.parametrize("follows_sizes", [False, True])
def test_what_its_operators_would_not_do_keeps_the_module_around_it_whole(
    kind: type[ReversibleNorm], follows_sizes: bool
) -> None:
    model = checked(Outer(Forecaster(norm_of(kind), follows_sizes=follows_sizes)))
    assert names(model) == ["model", "last"]
    assert model.inlined == frozenset()
    assert "'model.norm' keeps values in attributes between calls" in str(model.leaf_reasons["model"])


def test_a_named_leaf_module_stays_one_layer() -> None:
    model = checked(Outer(Forecaster(norm_of())), leaf_modules=["*.norm"])
    assert names(model) == ["model", "last"]


@pytest.mark.parametrize("options", [{"leaf_modules": ["norm"]}, {}])
def test_the_message_says_what_helps(options: dict[str, Any]) -> None:
    module = Forecaster(norm_of(ReversibleNorm if options else Counting))
    with pytest.raises(InvalidModel) as error:
        checked(module, **options)
    assert str(error.value).endswith(
        "first in 'norm'; likely because the forward of 'norm' keeps values in attributes between calls; let it return "
        "them, and pass them to the code that uses them"
    )


class Shown(nn.Module):
    """A layer that leaves its weights in an attribute to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUM_CHANNELS))
        self.last_weights = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        self.last_weights = x.softmax(-1) * self.weight
        return x * self.last_weights


class ReadsTheNorm(nn.Module):
    """The code around the norm reads its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shown, self.a, self.b = norm_of(), Shown(), nn.Linear(LENGTH, 6), nn.Linear(6, HORIZON)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shown(self.norm(x, "norm")).transpose(1, 2)
        y = self.b(self.a(y)).transpose(1, 2)
        return y * self.norm.deviation + self.norm.center


def test_only_modules_whose_attributes_others_read_are_inlined() -> None:
    module = ReadsTheNorm()
    module.norm.center = module.norm.deviation = torch.ones(1)
    model = checked(module)
    assert model.inlined == {"norm"}
    assert names(model) == ["shown", "a", "b"]
