"""Tensors in nested values: tuples, lists, mappings and dataclasses."""

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from bapipe.torch_private.tensors import tree_leaves


def parts_of(value: Any) -> list[tuple[Callable[..., Any], Any, Any]]:
    """Returns the parts of a nested value, each with the function and the key that select it."""
    if isinstance(value, Mapping):
        return [(operator.getitem, key, part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [(operator.getitem, index, part) for index, part in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(getattr, part.name, getattr(value, part.name)) for part in fields(value)]
    return []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a nested value."""
    if isinstance(value, Tensor):
        yield value
    else:
        for _, _, part in parts_of(value):
            yield from tensors_in(part)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a nested value with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple; torch's own take all in one argument
        return value._make(map_tensors(part, change) for part in value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(part, change) for part in value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(part, change) for key, part in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)  # its `__init__` may not take all of them, and `__post_init__` may check values
        for _, name, part in parts_of(value):
            object.__setattr__(made, name, map_tensors(part, change))
        return made
    return value


def register_dataclasses(value: Any) -> None:
    """Makes torch know the dataclasses in a nested value, so that it can take them apart and put them together."""
    if is_dataclass(value) and not isinstance(value, Mapping | type) and len(tree_leaves(value)) == 1:
        with suppress(ValueError):  # it has one part only, and is known already
            torch.export.register_dataclass(type(value))
    for _, _, part in parts_of(value):
        register_dataclasses(part)
