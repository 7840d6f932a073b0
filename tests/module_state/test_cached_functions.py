"""A cache of a function does not decide what tracing finds, and tracing leaves it as it was."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.module_state.cached_functions import caches_bypassed
from bapipe.tracing.layers import trace
from bapipe.tracing.stages import cut_into_stages

X = torch.ones(2, 4)


@lru_cache
def table(length: int) -> Tensor:
    return torch.sin(torch.arange(float(length)))


class Added(nn.Module):
    """Adds a table between two layers, behind a branch that torch.fx does not follow."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.make = nn.Linear(4, 4), nn.Linear(4, 4), make

    def table(self) -> Tensor:
        return self.make(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.shape[0] > 0:
            x = x + self.table()
        y: Tensor = self.b(x)
        return y


class ByGlobal(Added):
    def table(self) -> Tensor:
        return table(4)


class ByMethod(Added):
    @staticmethod
    @cache
    def made(length: int) -> Tensor:
        return table.__wrapped__(length)

    def table(self) -> Tensor:
        return self.made(4)


def in_closure() -> tuple[nn.Module, Any]:
    own = lru_cache(table.__wrapped__)
    return Added(lambda length: own(length)), own


def in_attribute() -> tuple[nn.Module, Any]:
    own = lru_cache(table.__wrapped__)
    return Added(own), own


@pytest.mark.parametrize(
    "make",
    [
        in_closure,
        in_attribute,
        lambda: (ByGlobal(table), table),
        lambda: (ByMethod(table), vars(ByMethod)["made"].__func__),
    ],
    ids=["closure", "attribute", "global", "method"],
)
def test_layers_are_the_same_with_a_cold_and_a_warm_cache(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    module, cached = make()
    around = nn.Sequential(nn.Linear(4, 4), module)
    for is_warm in (False, True):
        cached.cache_clear()
        if is_warm:
            module(X)
        before = cached.cache_info()
        model = trace(around, (X,))
        assert [layer.name for layer in model.layers] == ["0", "1.a", "1.b"]
        cut_into_stages(model, {"0": 0, "1.a": 0, "1.b": 1}, [X], 2)
        assert cached.cache_info() == before
    with caches_bypassed(around):
        assert torch.equal(module(X), module.b(module.a(X) + table.__wrapped__(4)))
    assert cached.cache_info() == before
    module(X)
    assert cached.cache_info().hits == before.hits + 1
