"""Deep copies keep what cannot be copied, and copy everything else."""

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from bapipe.module_state.copies import deep_copy


class Pair:
    """An object whose parts belong together."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.count = lock, 0


def _module(**attributes: Any) -> Any:
    module = nn.Sequential(nn.Linear(2, 2))
    for name, value in attributes.items():
        setattr(module[0], name, value)
    return module


def test_only_what_refuses_stays_and_everything_around_it_is_copied() -> None:
    lock, counts = threading.Lock(), [0]
    module = _module(functional=functional, kept={"lock": lock, "counts": counts}, also=counts)
    copy = deep_copy(module)
    assert copy is not module
    own = copy[0]
    assert own.functional is functional
    assert isinstance(own.functional, ModuleType)
    assert own.kept["lock"] is lock
    assert own.kept is not module[0].kept
    assert own.also is own.kept["counts"]  # one copy for all that hold it
    assert own.also is not counts
    assert own.weight is not module[0].weight
    assert torch.equal(own.weight, module[0].weight)


def test_an_object_is_copied_whole_or_not_at_all() -> None:
    pair = Pair(threading.Lock())
    copy = deep_copy([pair, [1]])
    assert copy[0] is pair
    assert copy[1] == [1]


def test_what_holds_itself_and_refuses_is_copied_around_that() -> None:
    lock = threading.Lock()
    values: list[Any] = [lock]
    values.append(values)
    module = _module(values=values)
    module[0].around = [module]
    copy = deep_copy(module)
    assert copy[0].values[0] is lock
    assert copy[0].values[1] is copy[0].values
    assert copy[0].around[0] is copy


@pytest.mark.parametrize("known", [False, True])
def test_copies_that_are_known_are_used_and_new_ones_are_added(known: bool) -> None:
    inner: list[int] = [1]
    value = [inner, threading.Lock()]
    other = [2]
    copies: dict[int, Any] = {id(inner): other} if known else {}
    copy = deep_copy(value, copies)
    assert copies[id(value)] is copy
    assert copies[id(value[1])] is value[1]
    assert copies[id(inner)] is copy[0]
    assert (copy[0] is other) == known
