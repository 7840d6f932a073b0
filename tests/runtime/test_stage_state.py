"""Parameters and buffers that a rank holds."""

import torch
from torch import nn

from bapipe.runtime.stage_state import StageState


def test_a_rank_holds_parameters_gradients_buffers_and_what_no_layer_uses() -> None:
    norm, unused = nn.BatchNorm1d(3), torch.ones(5)
    norm.weight.grad = torch.ones(3)
    state = StageState(modules={0: norm, 1: nn.Sequential(norm)}, unused=(unused,), names={}, keys=frozenset())
    memory = state.memory(optimizer_bytes=7)
    # Weight, bias, mean and variance of three values, and a counter of 8 bytes.
    assert (memory.params, memory.gradients, memory.optimizer) == (4 * 4 * 3 + 8 + 4 * 5, 4 * 3, 7)
    assert memory.total == memory.params + memory.gradients + memory.optimizer


def test_a_sparse_gradient_counts_what_it_holds() -> None:
    table = nn.Embedding(100, 4, sparse=True)
    table(torch.tensor([7, 7, 9])).sum().backward()
    state = StageState(modules={0: table}, unused=(), names={}, keys=frozenset())
    assert state.memory(optimizer_bytes=0).gradients == 2 * 4 * 4 + 2 * 8  # two rows, and their indices


def test_a_parameter_that_was_assigned_has_the_name_of_its_place() -> None:
    """Of tied ones, of which one place has another parameter now, each has the name of its own."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    names = {id(first.weight): ("a.weight", "b.weight")}
    modules: dict[int, nn.Module] = {0: nn.ModuleDict({"a": first}), 1: nn.ModuleDict({"b": second})}
    state = StageState(modules=modules, unused=(), names=names, keys=frozenset({"a.weight", "b.weight"}))
    tied = first.weight
    assert state.named_parameters() == {"a.weight": tied}
    first.weight = nn.Parameter(torch.zeros(2, 2))
    assert list(state.named_parameters()) == ["a.weight", "b.weight"]
    assert state.named_parameters()["a.weight"] is first.weight
    assert state.named_parameters()["b.weight"] is tied
