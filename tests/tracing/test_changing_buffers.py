"""Which buffers change while a model trains, whoever wrote its layers, and which layers share a stage for them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bapipe.tracing.aliasing import written_buffers
from bapipe.tracing.changing_state import changing_buffers, layers_in_one_stage, shared_changing_buffers
from bapipe.tracing.layers import trace
from bapipe.tracing.stages import cut_into_stages, shared_buffers


class Counted(nn.Linear):
    """A layer of one's own that counts its forwards."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.n.add_(1)
        return super().forward(x)


class Writes(nn.Module):
    """A layer that writes to a buffer of a part that has no code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = nn.Module()
        self.holder.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        n = self.holder.get_buffer("n")
        n.add_(1)
        return x * n.item()


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
        (Writes, True),
        (lambda: parametrizations.weight_norm(Counted()), True),
        (lambda: parametrizations.weight_norm(nn.BatchNorm1d(8)), True),
        (hooked, True),
    ],
)
def test_buffers_that_training_changes(made: Callable[[], nn.Module], changes: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), made())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    traced = trace(model, (torch.randn(3, 8),), leaf_modules=["1"])
    model(torch.randn(3, 8))
    changed = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert changed <= changing_buffers(traced)
    assert bool(changing_buffers(traced)) == bool(changed) == changes


class Twice(nn.Module):
    """Calls a module before and after another one."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.other = shared, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shared(self.other(self.shared(x)))
        return y


def test_of_the_buffers_of_other_code_those_bind_layers_that_it_was_seen_to_change() -> None:
    traced = trace(Twice(Counted()), (torch.ones(3, 8),))
    bound = ("shared", "shared#2")
    assert not written_buffers(traced)
    assert shared_changing_buffers(traced) == {"shared.n": bound}
    assert shared_changing_buffers(replace(traced, changed=frozenset({"shared.n"}))) == {"shared.n": bound}
    assert layers_in_one_stage(replace(traced, changed=frozenset({"shared.n"}))) == [bound]
    assert not shared_changing_buffers(replace(traced, changed=frozenset({"another.n"})))


def test_buffers_that_torch_changes_bind_layers_whatever_was_seen() -> None:
    """Running statistics may have the values already that they get."""
    traced = replace(trace(Twice(nn.BatchNorm1d(8)), (torch.ones(3, 8),)), changed=frozenset())
    assert layers_in_one_stage(traced) == [("shared", "shared#2")]


class Queue(nn.Module):
    """Reads a buffer behind one layer, and writes to it behind the next one."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(8, 8), nn.Linear(8, 8), write
        self.register_buffer("past", torch.ones(2, 8))
        self.past: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x) * self.past.sum(0))
        with torch.no_grad():
            self.write(self.past, y.mean(0))
        return y


def _assign(past: Tensor, value: Tensor) -> None:
    past[:1] = value


def _assign_row(past: Tensor, value: Tensor) -> None:
    past[0] = value


@pytest.mark.parametrize(
    "write",
    [
        _assign,
        _assign_row,
        lambda past, value: past.copy_(value),
        lambda past, value: past[:, 1:].mul_(value[1:]),
        lambda past, value: past.narrow(0, 1, 1).add_(value),
        lambda past, value: past.view(4, 4)[1].copy_(value[:4]),
    ],
)
def test_layers_share_a_stage_where_one_writes_to_a_part_of_a_buffer_that_the_other_reads(
    write: Callable[[Tensor, Tensor], object],
) -> None:
    traced = trace(Queue(write), (torch.ones(3, 8),))
    assert layers_in_one_stage(traced) == [("a", "b")]
    assert layers_in_one_stage(replace(traced, changed=frozenset({"past"}))) == [("a", "b")]


def test_a_buffer_of_which_a_stage_writes_to_a_part_is_known_to_be_shared() -> None:
    """Between processes, the other stage would not see what is written."""
    x = torch.ones(3, 8)
    parts = cut_into_stages(trace(Queue(_assign), (x,)), {"a": 0, "b": 1}, [x], 3)
    assert {name: stages for name, (_, stages) in shared_buffers(parts).items()} == {"past": (0, 1)}


def test_layers_that_write_to_a_copy_of_a_buffer_do_not_share_a_stage() -> None:
    """That it is a copy is not known from the graph, but from what a forward has changed."""
    traced = trace(Queue(lambda past, value: past.to(torch.float64).add_(value)), (torch.ones(3, 8),))
    assert layers_in_one_stage(replace(traced, changed=frozenset())) == []
