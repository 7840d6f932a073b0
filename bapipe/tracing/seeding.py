"""Notices forwards that seed torch's random numbers themselves, or draw them from a generator that they make.

A graph keeps neither: it would draw other numbers than the forward does. A module that is called as it is does not.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from bapipe.module_state.python_state import generators_kept
from bapipe.tracing.reasons import Reason

_LEAVE_OUT = "leave out the seeding, as a run has a seed, or put what draws into a module of its own"
SEEDS_ITSELF = Reason("its forward seeds torch's random numbers (a seed holds within its layer only)", _LEAVE_OUT)
_SEEDED = Reason("its forward seeds a generator of random numbers", _LEAVE_OUT)
_MADE = Reason(
    "its forward draws random numbers from a generator that no module has as an attribute",
    "make the generator in `__init__`, as an attribute of the module that draws from it",
)

_OF_CUDA = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")
_UNUSUAL_SEED = 5_201_314_159_265


class _Watched:
    """torch's default generator, for the functions that seed it."""

    def __init__(self, seeds: Callable[[], None], names: frozenset[str]) -> None:
        self._seeds, self._names = seeds, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            self._seeds()
        return getattr(torch.default_generator, name)


@contextmanager
def seeding_noticed(seeds: Callable[[], None], *, restoring: bool = True) -> Iterator[None]:
    """In this context `seeds` is called before functions of torch seed its global generators.

    The CPU's gets a seed by which `default_generator_is_seeded` tells later whether its own methods were called.

    Args:
        restoring: whether setting a state counts, as `torch.random.fork_rng` does at its end.
    """
    names = frozenset(("manual_seed", "seed", *(("set_state",) if restoring else ())))

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seeds()
            return original(*args, **kwargs)

        return call

    with ExitStack() as patches:
        patches.enter_context(patch.object(torch.random, "default_generator", _Watched(seeds, names)))
        for name in _OF_CUDA if restoring else ():
            patches.enter_context(patch.object(torch.cuda, name, watched(getattr(torch.cuda, name))))
        mark_default_generator()
        yield


def mark_default_generator() -> None:
    """Gives torch's default generator a seed by which `default_generator_is_seeded` tells whether it gets another."""
    torch.default_generator.manual_seed(_UNUSUAL_SEED)


def default_generator_is_seeded() -> bool:
    """Returns whether torch's default generator has been seeded since it was marked."""
    return torch.default_generator.initial_seed() != _UNUSUAL_SEED


@contextmanager
def generators_watched(module: nn.Module) -> Iterator[Callable[[object], Reason | None]]:
    """Yields a function that says why a graph of the module's forward, which runs here, cannot draw from a generator.

    It returns None for a generator that a part of the module has as an attribute, and that nothing has seeded here.
    """
    own = [kept for kept in generators_kept(module).values() if isinstance(kept, torch.Generator)]
    before = [generator.get_state() for generator in own]
    for generator in own:
        generator.manual_seed(_UNUSUAL_SEED)  # so that seeding it as before is a change, too

    def fault(generator: object) -> Reason | None:
        if not isinstance(generator, torch.Generator) or generator is torch.default_generator:
            return None
        if all(generator is not kept for kept in own):
            return _MADE
        return None if generator.initial_seed() == _UNUSUAL_SEED else _SEEDED

    try:
        yield fault
    finally:
        for generator, state in zip(own, before, strict=True):
            generator.set_state(state)
