"""Deep copies of objects with parts that refuse to be copied, such as open files, locks and modules of Python."""

import copy
from collections import ChainMap, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from torch import nn

_T = TypeVar("_T")


def deep_copy(value: _T, copies: dict[int, Any] | None = None) -> _T:
    """Returns a deep copy of an object; what refuses to be copied stays as it is in it.

    That is the innermost part that refuses, as far as modules of torch and collections hold it: an object of another
    class is copied whole or not at all, because only its class knows what belongs together.

    Args:
        value: any object.
        copies: what stands for an object, by its id: another one, or the object itself if it is not to be copied. Each
            copy is added, and each part that refuses.
    """
    copies = {} if copies is None else copies
    made: dict[int, Any] = {}  # what is copied before another part refuses is not used
    try:
        copied = copy.deepcopy(value, ChainMap(made, copies))  # type: ignore[arg-type]
    except Exception:  # classes raise whatever they like
        _keep_what_refuses(value, copies)
        made.clear()
        copied = copy.deepcopy(value, ChainMap(made, copies))  # type: ignore[arg-type]
    copies.update(made)
    return copied


def _keep_what_refuses(value: Any, copies: dict[int, Any]) -> None:
    """Lets the innermost parts of a value that refuse to be copied stand for themselves."""
    if _can_be_copied(value, copies):
        return
    copies[id(value)] = value  # while its parts are tried, which may hold it in turn
    for part in _parts(value):
        _keep_what_refuses(part, copies)
    del copies[id(value)]
    if not _can_be_copied(value, copies):
        copies[id(value)] = value


def _can_be_copied(value: Any, copies: dict[int, Any]) -> bool:
    with suppress(Exception):
        copy.deepcopy(value, ChainMap({}, copies))  # type: ignore[arg-type]
        return True
    return False


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        return vars(value).values()
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset | deque) else ()
