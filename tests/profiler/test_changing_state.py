"""What a forward changes in a model restricts the plans of its profile."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bapipe
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from tests.models.small_modules import layers, profile


class Queue(nn.Module):
    """A queue of past batches that the next forward compares with, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)
        self.register_buffer("past", torch.zeros(5))
        self.past: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        z = y - self.past.clone()
        self.past.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        scores: Tensor = self.last(z)
        return scores


class NormTwice(nn.Module):
    """One batch norm, without parameters, in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.norm(self.b(self.norm(self.a(x)))))
        return y


class Noisy(nn.Module):
    """A layer that adds noise from a generator of its own; `is_whole`: torch.fx cannot follow its code."""

    def __init__(self, *, is_whole: bool = False) -> None:
        super().__init__()
        self.linear, self.generator, self.is_whole = nn.Linear(5, 5), torch.Generator().manual_seed(1), is_whole

    def forward(self, x: Tensor) -> Tensor:
        if self.is_whole and float(x.detach().sum()) > 1e9:
            return x
        y: Tensor = self.linear(x)
        return y + torch.randn(y.shape, generator=self.generator)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Noisy(), "linear"),  # of whose operators one is given the generator
        (nn.Sequential(nn.Linear(5, 5), Noisy()), "1"),
        (nn.Sequential(nn.Linear(5, 5), Noisy(is_whole=True)), "1"),
    ],
)
def test_a_layer_that_draws_from_a_generator_of_its_own_allows_no_replicas(module: nn.Module, name: str) -> None:
    made = profile(module, 5)
    assert [each for each, (layer, _) in layers(made).items() if not layer.allows_replicas] == [name]


def test_a_layer_whose_buffer_the_next_forward_reads_allows_no_replicas() -> None:
    made = profile(Queue(), 6)
    without_replicas = [name for name, (layer, _) in layers(made).items() if not layer.allows_replicas]
    assert without_replicas == ["norm"]  # with the operators after it


def test_layers_that_change_one_buffer_share_a_stage() -> None:
    made = profile(NormTwice(), 6, sizes=(2,))
    norms = [name for name, (layer, _) in layers(made).items() if layer.kind == "BatchNorm1d"]
    assert [layers(made)[name][0].shares for name in norms] == [(norms[1],), (norms[0],)]
    plan = bapipe.plan(made, 2, minibatch_size=8, num_stages=2, replicas=False)
    assert {sum(name in stage.layers for name in norms) for stage in plan.stages} == {0, 2}


class Table(nn.Module):
    """Scales by a buffer that its forwards leave alone, or change."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("unset", torch.full((2,), torch.nan))
        self.scale: Tensor
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            self.scale.mul_(1.5)
        return x * self.scale.clone() if x.detach().sum().item() < 1e9 else x


class OneTable(nn.Module):
    """All layers share a table, as the blocks of some transformers share their rotary embedding."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.a, self.b, self.table = nn.Linear(5, 5), nn.Linear(5, 5), Table(changes=changes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.table(self.a(self.table(x))))
        return y


@pytest.mark.parametrize("changes", [False, True])
def test_a_shared_buffer_ties_layers_if_forwards_change_it(changes: bool) -> None:
    made = profile(OneTable(changes=changes), 5, sizes=(2,))
    shared = {"table.scale": ["table", "table#2"]} if changes else None
    assert made.environment.get("shared_buffers") == shared
    assert {layer.name: layer.shares for layer in made.layers if layer.shares} == (
        {"table": ("table#2",), "table#2": ("table",)} if changes else {}
    )
    if changes:
        with pytest.raises(
            bapipe.BapipeError,
            match=r"^'table' and 'table#2' are in different stages, but share a buffer that training may change, or "
            "memory that one of them changes in place, or parameters of unknown size: ",
        ):
            bapipe.make(made, 2, minibatch_size=4, microbatch_size=2, cuts=[2])
    else:
        assert bapipe.make(made, 2, minibatch_size=4, microbatch_size=2, cuts=[2])


class Teacher(nn.Module):
    """A frozen copy of a layer that each forward in training moves towards it; and a trained weight that it scales."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 5), nn.Linear(6, 5).requires_grad_(False)
        self.limited = nn.Embedding(3, 5, max_norm=0.1)
        self.last = Unit()

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x) + self.limited((x[:, 0] > 0).long())
        with torch.no_grad():
            self.teacher.weight.mul_(0.5).add_(self.student.weight, alpha=0.5)
        scores: Tensor = self.last(y - self.teacher(x))
        return scores


class Unit(nn.Linear):
    """Makes its weight one of norm 2, past torch's count of writes to it."""

    def __init__(self) -> None:
        super().__init__(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(2 / self.weight.data.norm())
        return super().forward(x)


class Centered(nn.Module):
    """A loss that keeps the moving average of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(5))
        self.center: Tensor

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            self.center.mul_(0.9).add_(output.mean(0), alpha=0.1)
        return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize("options", [{}, {"check": False}, {"layer_by_layer": True}])
def test_measuring_leaves_the_model_and_the_loss_as_they_were(options: dict[str, Any]) -> None:
    module, loss = Teacher(), Centered()
    before = copy.deepcopy(module.state_dict())
    sizes = ProfileOptions(microbatch_sizes=(2,), seconds_per_size=0.0, **options)
    measure_model(module, (torch.randn(2, 6),), torch.tensor([4, 1]), loss, sizes, name="teacher")
    assert [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])] == []
    assert loss.center.eq(0).all()
    assert [name for name, one in module.named_parameters() if not one.requires_grad] == [
        "teacher.weight",
        "teacher.bias",
    ]
    assert all(one.is_leaf and one.grad is None for one in module.parameters())
