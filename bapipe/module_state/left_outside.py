"""Tensors that forwards leave outside of their module, such as in a global list, and how to remove them."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

from torch import Tensor, fx, nn

from bapipe.module_state.reached_state import is_plain
from bapipe.module_state.variables import closure_of, globals_of
from bapipe.module_state.whose_code import is_of_the_user, written_class

_MAX_OBJECTS, _MAX_DEPTH = 1_000, 3
"""How many objects that a forward names are looked into at most, and how deep tensors may be nested in what it leaves.
"""


_Place = tuple[object, Callable[[], object], Callable[[], bool]]
"""An object, what removes the tensors left in it, and what says whether there are any."""


@contextmanager
def left_outside(module: nn.Module) -> Iterator[Callable[[], list[object]]]:
    """Forwards may run in this context; afterwards the tensors are removed that they have left outside of the module.

    A pass without values, or one that no loss follows, would leave in a global list what the next loss reads. Looked
    into are the collections and plain objects that the user's forwards name in globals and closures, and what these
    hold. All else stays: a flag that says that something has been done once is to stay set.

    Yields a function that returns the collections and objects in which there are such tensors now.
    """
    places = list(_places(module))

    def changed() -> list[object]:
        return [owner for owner, _, has_new in places if _quietly(has_new)]

    try:
        yield changed
    finally:
        for _, remove, _ in places:
            _quietly(remove)


def _quietly(action: Callable[[], Any]) -> Any:
    """Returns what an action returns, None if it fails: objects of the user's may raise anything."""
    with suppress(Exception):
        return action()
    return None


def _places(module: nn.Module) -> Iterator[_Place]:
    kinds = {kind: None for kind in map(written_class, module.modules()) if is_of_the_user(kind)}
    own = {id(part) for part in module.modules()}
    todo: list[Any] = [getattr(kind, "forward", None) for kind in kinds]
    seen: set[int] = set()
    while todo and len(seen) < _MAX_OBJECTS:
        one = todo.pop(0)
        if id(one) in seen or id(one) in own or isinstance(one, Tensor | nn.Module):
            continue
        seen.add(id(one))
        with suppress(Exception):  # whatever an object of the user's raises when it is looked at
            if isinstance(one, FunctionType):
                if is_of_the_user(one):
                    named = globals_of(one)
                    yield _in_dictionary(one.__globals__, one.__globals__, set(named))
                    todo += [*named.values(), *closure_of(one).values()]
            elif isinstance(one, list | deque):
                yield _in_sequence(one)
            elif isinstance(one, dict):
                yield _in_dictionary(one, one, None)
                todo += one.values()
            elif is_plain(one) and is_of_the_user(type(one)):
                yield _in_dictionary(one, vars(one), None)
                todo += vars(one).values()
                todo += [value for value in vars(type(one)).values() if isinstance(value, FunctionType)]


def _in_sequence(one: Any) -> _Place:
    before = list(one)  # which keeps their ids from being used again
    ids = {id(item) for item in before}

    def is_new(item: object) -> bool:
        return id(item) not in ids and _holds_tensors(item)

    def remove() -> None:
        if any(map(is_new, one)):
            kept = [item for item in one if not is_new(item)]
            one.clear()
            one.extend(kept)

    return one, remove, lambda: any(map(is_new, one))


def _in_dictionary(owner: object, entries: dict[Any, Any], names: set[str] | None) -> _Place:
    """`names` are the keys that count; None counts all."""
    before = dict(entries) if names is None else {name: entries[name] for name in names}

    def new() -> list[Any]:
        keys = list(entries) if names is None else [name for name in names if name in entries]
        return [key for key in keys if before.get(key) is not entries[key] and _holds_tensors(entries[key])]

    def remove() -> None:
        for key in new():
            if key in before:
                entries[key] = before[key]
            else:
                del entries[key]

    return owner, remove, lambda: bool(new())


def _holds_tensors(one: object, depth: int = _MAX_DEPTH) -> bool:
    if isinstance(one, Tensor | fx.Proxy):
        return True
    inside = one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple | set | deque) else ()
    return depth > 0 and any(_holds_tensors(part, depth - 1) for part in inside)
