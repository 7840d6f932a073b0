"""The random generators of Python and of numpy, which a model's forward may draw from beside torch's."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bapipe.torch_private.seeds import seeds_of_unused_gpus_restored

GlobalGeneratorStates = tuple[Any, Any]
"""States of the global generators of Python and, if it is imported, of numpy; they can be compared."""


def global_generator_states() -> GlobalGeneratorStates:
    """Returns the states of the global generators."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    name, keys, *more = numpy.random.get_state()
    return random.getstate(), (name, tuple(keys.tolist()), *more)


def set_generators(seed: int) -> None:
    """Seeds the global generators."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def seed_cpu_generators(seed: int) -> None:
    """Seeds the global generators that code on the CPU draws from: torch's, too."""
    torch.default_generator.manual_seed(seed)
    set_generators(seed)


def seed_all_generators(seed: int) -> None:
    """Seeds the global generators, and torch's of all devices."""
    torch.manual_seed(seed)
    set_generators(seed)


def restore_global_generators(states: GlobalGeneratorStates) -> None:
    """Sets the global generators to earlier states."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


@contextmanager
def generators_restored() -> Iterator[None]:
    """In this context the generators may draw; afterwards they are as before."""
    before = global_generator_states()
    try:
        yield
    finally:
        restore_global_generators(before)


@contextmanager
def all_generators_restored(device: torch.device | None = None) -> Iterator[None]:
    """As `generators_restored`, also for torch's global generators of the CPU and of all GPUs.

    `device` is the one that is drawn on, where that is known: then no other GPU's generator is looked at.
    """
    with generators_restored(), seeds_of_unused_gpus_restored(), torch.random.fork_rng(devices=[]):
        before = [(generator, generator.get_state()) for generator in _generators_of_gpus(device)]
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)


def _generators_of_gpus(device: torch.device | None) -> Sequence[torch.Generator]:
    if device is None:
        return torch.cuda.default_generators  # none before torch uses a GPU
    if device.type != "cuda":
        return ()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return (torch.cuda.default_generators[index],)
