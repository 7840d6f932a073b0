"""How a layer nests what it returns, which the code around it was traced with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

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
    """Adds to a graph with the copy of a layer's node that OtherStructure is raised unless it is nested as traced."""
    if STRUCTURE in node.meta:
        graph.call_function(plain_function(_Check(layer, node.meta[STRUCTURE]), "check_structure"), (copy,))


@dataclass(frozen=True, slots=True)
class _Check:
    layer: str
    traced: Any

    def __call__(self, result: Any) -> None:
        found = structure(result)
        if found != self.traced:
            raise OtherStructure(
                f"layer '{self.layer}' returned {_in_words(found)}, and {_in_words(self.traced)} when the model was "
                "traced: make it and what uses these one layer (`leaf_modules`)"
            )


def _in_words(found: Any) -> str:
    text = str(found).replace("'", "")
    return text if len(text) <= 40 else f"{text[:37]}..."
