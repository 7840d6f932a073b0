"""How a layer nests what it returns, which the code around it was traced with."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from torch import Tensor, fx

from bapipe.module_state.whose_code import calls_other_code
from bapipe.tracing.nested_tensors import parts_of
from bapipe.tracing.recorded_functions import plain_function

STRUCTURE = "bapipe_structure"
"""Key of a node's `meta`: the structure of what a layer returns, if that is nested."""


class OtherStructure(Exception):
    """A layer returns another number of values than when the model was traced, or other kinds of them."""


def structure(value: Any) -> Any:
    """Returns lists and dictionaries as a nested value has them, with what each leaf is in its place, in words."""
    if isinstance(value, Tensor):
        return "tensor"
    parts = parts_of(value)
    if isinstance(value, list | tuple):
        return [structure(part) for _, _, part in parts]
    if parts or isinstance(value, Mapping):
        return {key: structure(part) for _, key, part in parts}
    return "None" if value is None else "value"


def add_structure_check(graph: fx.Graph, node: fx.Node, copy: fx.Node, layer: str) -> None:
    """Adds to a graph with the copy of a layer's node that OtherStructure is raised unless it is nested as traced.

    Where tracing has not seen values, what the code around the layer selects from its result must be there, in a result
    of the same kind as that of the layer's first call.
    """
    check: _Check | _CheckOfCalls | None = None
    if STRUCTURE in node.meta:
        check = _Check(layer, node.meta[STRUCTURE])
    elif _may_vary(node):
        check = _CheckOfCalls(layer, _selected_keys(node))
    if check is not None:
        graph.call_function(plain_function(check, "check_structure"), (copy,))


def _may_vary(node: fx.Node) -> bool:
    """Returns whether a node calls a module whose code may return something else each time: it is not torch's own."""
    owner = node.graph.owning_module
    return node.op == "call_module" and owner is not None and calls_other_code(owner.get_submodule(str(node.target)))


def _selected_keys(node: fx.Node) -> tuple[int | str, ...]:
    keys = (user.args[1] for user in node.users if user.target is operator.getitem and user.args[0] is node)
    return tuple(key for key in keys if isinstance(key, int | str))


@dataclass(frozen=True, slots=True)
class _Check:
    layer: str
    traced: Any

    def __call__(self, result: Any) -> None:
        found = structure(result)
        if found != self.traced:
            raise _other(self.layer, _in_words(found), f"{_in_words(self.traced)} when the model was traced")


@dataclass(slots=True)
class _CheckOfCalls:
    """Compares the results of a layer's calls with that of the first one."""

    layer: str
    keys: tuple[int | str, ...]
    first: str | None = None

    def __call__(self, result: Any) -> None:
        kind = _kind(result)
        self.first = self.first or kind
        if kind != self.first:
            raise _other(self.layer, kind, f"{self.first} in its first call")
        missing = next((key for key in self.keys if not _has(result, key)), None)
        if missing is not None:
            before = f"one with the entry {missing!r} when the model was traced"
            raise _other(self.layer, _in_words(structure(result)), before)


def _kind(result: Any) -> str:
    kinds = ((Tensor, "a tensor"), (list | tuple, "a list"), (Mapping, "a dictionary"), (NoneType, "None"))
    return next((name for kind, name in kinds if isinstance(result, kind)), f"a {type(result).__name__}")


def _has(result: Any, key: int | str) -> bool:
    """Returns whether a list or dictionary has an entry; True of classes that may understand keys otherwise."""
    if isinstance(result, list | tuple) and isinstance(key, int):
        return -len(result) <= key < len(result)
    return type(result) is not dict or key in result


def _other(layer: str, found: str, before: str) -> OtherStructure:
    return OtherStructure(
        f"layer '{layer}' returned {found}, and {before}: make it and what uses these one layer (`leaf_modules`)"
    )


def _in_words(found: Any) -> str:
    text = str(found).replace("'", "")
    return text if len(text) <= 40 else f"{text[:37]}..."
