"""Iterators that code advances: for a while it gets copies of them, where they can be copied."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import nn

from bapipe.module_state.variables import cells_of, globals_of

_MAX_ITEMS = 1000
"""A collection of more items is data, and is not looked into."""


def is_iterator(one: object) -> bool:
    """Returns whether an object is an iterator of Python's own, such as an `itertools.count` or a generator."""
    return isinstance(one, Iterator) and type(one).__module__ in ("builtins", "itertools")


def copied_iterator(one: Any) -> Any:
    """Returns an iterator that gives what another one will; what it gives is not copied.

    Raises:
        TypeError: it cannot be copied, as a generator, or one that takes what a generator gives.
    """
    if isinstance(one, GeneratorType) or not is_iterator(one):
        raise TypeError(f"a {type(one).__name__} cannot be copied")
    make, arguments, *state = one.__reduce__()
    copy = make(*map(_with_copies, arguments))
    if state and state[0] is not None:
        is_cycle = isinstance(one, cycle)  # which keeps in a list what it has given
        copy.__setstate__((list(state[0][0]), state[0][1]) if is_cycle else _with_copies(state[0]))
    return copy


def _with_copies(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_with_copies, value))
    return copied_iterator(value) if isinstance(value, Iterator) else value


def can_be_copied(one: object) -> bool:
    """Returns whether `copied_iterator` can copy an iterator."""
    try:
        copied_iterator(one)
    except Exception:  # whatever what it takes from raises
        return False
    return True


@contextmanager
def iterators_copied(reached: Iterable[object]) -> Iterator[dict[int, Any]]:
    """In this context functions, objects and collections hold copies of iterators, so that these are not advanced.

    One that several hold is one copy. Iterators that cannot be copied stay.

    Yields the copies, by the ids of the iterators.
    """
    owners = list(reached)
    iterators = {id(value): value for one in owners for value, _ in _held(one) if is_iterator(value)}
    copies: dict[int, Any] = {}
    for key, value in iterators.items():
        with suppress(Exception):  # it cannot be copied
            copies[key] = copied_iterator(value)
    _replace(owners, copies)
    try:
        yield copies
    finally:
        _replace(owners, {id(copy): iterators[key] for key, copy in copies.items()})


def _replace(owners: Iterable[object], others: dict[int, Any]) -> None:
    """Makes owners hold other objects in place of those with some ids."""
    if others:
        for one in owners:
            for value, put in list(_held(one)):
                if id(value) in others:
                    put(others[id(value)])


def _held(one: Any) -> Iterator[tuple[object, Callable[[Any], object]]]:
    """Yields the values that an object holds, each with what makes it hold another one in its place."""
    if isinstance(one, FunctionType):
        yield from ((value, partial(one.__globals__.__setitem__, name)) for name, value in globals_of(one).items())
        yield from ((cell.cell_contents, partial(setattr, cell, "cell_contents")) for cell in cells_of(one).values())
        for index, value in enumerate(one.__defaults__ or ()):
            yield value, partial(_set_default, one, index)
        yield from _items(one.__kwdefaults__ or {})
        yield from _items(vars(one))
    elif isinstance(one, dict):
        yield from _items(one)
    elif isinstance(one, list | deque) and len(one) <= _MAX_ITEMS:
        yield from ((value, partial(one.__setitem__, index)) for index, value in enumerate(one))
    elif isinstance(one, type | ModuleType):
        yield from ((value, partial(setattr, one, name)) for name, value in list(vars(one).items()))
    elif not isinstance(one, nn.Module) and isinstance(getattr(one, "__dict__", None), dict):
        yield from _items(vars(one))


def _items(entries: dict[Any, Any]) -> Iterator[tuple[object, Callable[[Any], object]]]:
    if len(entries) <= _MAX_ITEMS:
        yield from ((value, partial(dict.__setitem__, entries, key)) for key, value in list(dict.items(entries)))


def _set_default(function: FunctionType, index: int, value: Any) -> None:
    defaults = function.__defaults__ or ()
    function.__defaults__ = (*defaults[:index], value, *defaults[index + 1 :])
