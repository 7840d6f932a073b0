"""A value that a layer leaves in an attribute is seen by its stage alone, as if every stage were a process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bapipe.equivalence.check import (
    Difference,
    Equivalence,
    Unchecked,
    compare_stages,
    example_microbatches,
)
from bapipe.equivalence.choose_layers import trace_checked
from bapipe.equivalence.outcome import TRAINING
from bapipe.equivalence.stage_pass import Stage
from bapipe.errors import InvalidModel
from bapipe.module_state.python_state import PythonState, attributes_of
from bapipe.tracing.layers import trace
from bapipe.tracing.stage_module import stage_module
from bapipe.tracing.stages import cut_into_stages

X, TARGET = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3])


class Kept:
    value = 0.0


class Leaves(nn.Module):
    """A layer that keeps a number of its samples in a dictionary, and in an object."""

    def __init__(self, values: dict[str, float], kept: Kept) -> None:
        super().__init__()
        self.weight, self.values, self.kept, self.last = nn.Parameter(torch.ones(6)), values, kept, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.values["mean"] = self.kept.value = self.last = x.abs().mean().item()
        return x * self.weight


class Reads(nn.Module):
    """A layer that reads what another one keeps."""

    def __init__(self, values: dict[str, float], kept: Kept) -> None:
        super().__init__()
        self.weight, self.values, self.kept = nn.Parameter(torch.ones(6)), values, kept

    def forward(self, x: Tensor) -> Tensor:
        number = self.values.get("mean", 0.0) if x.sum().item() < 1e9 else 0.0
        return x * self.weight * (1 + number + self.kept.value)


class Talks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values, kept = dict[str, float](), Kept()
        self.a, self.leaves, self.b = nn.Linear(6, 6), Leaves(values, kept), nn.Linear(6, 6)
        self.reads, self.head = Reads(values, kept), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.reads(self.b(self.leaves(self.a(x)))))
        return y


def compared(
    module: nn.Module, cut: str, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
) -> Equivalence | Unchecked | Difference:
    model = trace(module, [X], leaf_modules=["leaves", "reads"])
    names = [layer.name for layer in model.layers]
    parts = cut_into_stages(model, {name: int(names.index(name) >= names.index(cut)) for name in names}, [X], 2)
    stages = [Stage(tensors=tensors, module=stage_module(parts, s)) for s, tensors in enumerate(parts.stages)]
    microbatches = example_microbatches([X], TARGET, [2, 2], torch.device("cpu"))
    return compare_stages(model, stages, loss, microbatches, TRAINING)


@pytest.mark.parametrize(("cut", "equal"), [("leaves", True), ("b", False), ("reads", False), ("head", True)])
def test_layers_that_talk_in_python_must_be_in_one_stage(cut: str, equal: bool) -> None:
    module = Talks()
    assert isinstance(compared(module, cut), Equivalence if equal else Difference)
    assert (module.leaves.values, module.leaves.kept.value, module.leaves.last) == ({}, 0.0, 0.0)
    assert module.leaves.values is module.reads.values
    assert module.leaves.kept is module.reads.kept


@pytest.mark.parametrize(("cut", "equal"), [("leaves", True), ("reads", False)])
def test_a_loss_sees_the_attributes_of_the_last_stage(cut: str, equal: bool) -> None:
    module = Talks()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) * (1 + module.leaves.last)

    with torch.no_grad():
        module.reads.weight.zero_()  # so that only the loss can differ
    assert isinstance(compared(module, cut, loss), Equivalence if equal else Difference)


MEANS: list[Tensor] = []
"""What layers leave for the loss."""


class LeavesInAGlobal(nn.Module):
    """A layer that leaves a term of the loss in a global list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        MEANS.append((x * self.weight).pow(2).mean())
        return x * self.weight


def loss_with_means(output: Tensor, target: Tensor) -> Tensor:
    value = sum(MEANS, start=cross_entropy(output, target))
    MEANS.clear()
    return value


@pytest.mark.parametrize(("cut", "equal"), [("leaves", True), ("b", False)])
def test_a_loss_sees_what_the_last_stage_leaves_outside_of_the_model(cut: str, equal: bool) -> None:
    module = Talks()
    module.leaves, module.reads = LeavesInAGlobal(), nn.Linear(6, 6)  # type: ignore[assignment]
    assert isinstance(compared(module, cut, loss_with_means), Equivalence if equal else Difference)
    assert not MEANS


def test_tracing_leaves_nothing_outside_of_the_model() -> None:
    trace(nn.Sequential(nn.Linear(6, 6), LeavesInAGlobal(), nn.Linear(6, 5)), [X])
    assert not MEANS


def test_a_loss_that_reads_what_layers_leave_is_told_why_it_cannot() -> None:
    module = nn.Sequential(LeavesInAGlobal(), nn.Linear(6, 5))
    with pytest.raises(InvalidModel, match="first in 'loss'; a loss can read only what the model returns"):
        trace_checked(module, [X], loss_with_means, example_microbatches([X], TARGET, [2, 2], torch.device("cpu")))


def test_a_loss_that_reads_an_attribute_is_told_why_it_cannot() -> None:
    class KeepsItsLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.b(self.a(x))
            self.last = result.pow(2).mean()
            return result

    module = KeepsItsLoss()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return module.last  # type: ignore[return-value]

    with pytest.raises(InvalidModel, match=r"gives None.*; a loss can read only what the model returns"):
        trace_checked(module, [X], loss, example_microbatches([X], TARGET, [2, 2], torch.device("cpu")))


class Counts:
    """A hook of several layers that scales what they give by the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.calls += 1
        return output * self.calls


@pytest.mark.parametrize(("cut", "equal"), [("leaves", False), ("head", True)])
def test_layers_whose_hooks_share_what_they_keep_must_be_in_one_stage(cut: str, equal: bool) -> None:
    module, counts = Talks(), Counts()
    module.a.register_forward_hook(counts)
    module.b.register_forward_hook(counts)
    assert isinstance(compared(module, cut), Equivalence if equal else Difference)
    assert counts.calls == 0


def test_copies_of_attributes_are_as_many_as_the_attributes() -> None:
    module = Talks()
    kept = PythonState(attributes_of(module), [], []).copied({})
    module.leaves.values["mean"] = 1.0
    kept.put_back()
    assert module.leaves.values == {}
    assert module.leaves.values is module.reads.values
