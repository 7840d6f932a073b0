"""The random generators of Python and of numpy, which a model's forward may draw from beside torch's."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def generator_states() -> tuple[Any, ...]:
    """Returns the states of the global generators, which can be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *more = numpy.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *more)


def set_generators(seed: int) -> None:
    """Seeds the global generators."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def generators_restored() -> Iterator[None]:
    """In this context the generators may draw; afterwards they are as before."""
    numpy = sys.modules.get("numpy")
    before, numpy_before = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(numpy_before)
