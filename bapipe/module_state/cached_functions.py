"""Functions that `functools.lru_cache` caches, and forwards that call them without their caches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

from torch import nn

from bapipe.module_state.code_state import reached_by, states_of_forwards
from bapipe.module_state.names_in_code import names_in
from bapipe.module_state.reached_state import CachedFunction
from bapipe.module_state.variables import cells_of


@contextmanager
def caches_bypassed(module: nn.Module) -> Iterator[None]:
    """In this context forwards call the functions that they cache anew each time; their caches stay as they are.

    So a forward on tensors without values leaves none of these in a cache, nor does what it calls depend on what the
    process has called before. These are functions of the user's code, by `functools.lru_cache` or `functools.cache`.
    """
    reached = list(reached_by(states_of_forwards(module)).values())
    cached = {id(one): _uncached(one) for one in reached if isinstance(one, CachedFunction)}
    if not cached:
        yield
        return
    with ExitStack() as patches:
        for part in module.modules():
            _replace(patches, vars(part), vars(part), cached)
        for one in reached:
            if isinstance(one, FunctionType):
                _replace(patches, one.__globals__, names_in(one), cached)
                for cell in cells_of(one).values():
                    made = cached.get(id(cell.cell_contents))
                    if made is not None:
                        patches.callback(setattr, cell, "cell_contents", cell.cell_contents)
                        cell.cell_contents = made
            elif isinstance(one, type | ModuleType):
                for name, value in list(vars(one).items()):
                    is_static = isinstance(value, staticmethod)
                    made = cached.get(id(value.__func__ if is_static else value))
                    if made is not None:
                        patches.enter_context(patch.object(one, name, staticmethod(made) if is_static else made))
        yield


def _uncached(function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function.__wrapped__(*args, **kwargs)

    for name in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, name, getattr(function, name))
    return update_wrapper(call, function.__wrapped__)


def _replace(patches: ExitStack, owner: dict[str, Any], names: Iterable[str], cached: dict[int, Any]) -> None:
    for name in list(names):
        value = owner.get(name)
        if id(value) in cached:
            patches.callback(owner.__setitem__, name, value)
            owner[name] = cached[id(value)]
