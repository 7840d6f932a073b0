"""What can be reached from some nodes of a graph."""

from collections.abc import Callable, Iterable
from typing import TypeVar

N = TypeVar("N")


def reached(start: Iterable[N], following: Callable[[N], Iterable[N]]) -> list[N]:
    """Returns some nodes and all that can be reached from them, each once, in the order of a depth-first search."""
    found: dict[N, None] = {}
    todo = list(start)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += following(node)
    return list(found)
