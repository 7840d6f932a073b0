"""What a module's forward changes in the module itself, beside its results, and how to undo it."""

import copy
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Attributes = list[tuple[nn.Module, dict[str, object]]]
"""Modules with attributes of theirs, by name."""

_COPIED = (list, dict, set, bytearray, random.Random, torch.Generator, itertools.count)


@contextmanager
def state_restored(module: nn.Module, *, parameters: bool = False) -> Iterator[dict[int, Tensor]]:
    """The module may run in this context; afterwards its attributes and buffers are what they were, with their values.

    Lists, dictionaries, counters and objects with attributes of their own are replaced by copies meanwhile. What a
    forward changes outside of the module, such as a global variable, is not undone. Yields copies of the values of
    tensors, by the tensor's id.

    Args:
        parameters: whether to restore the values of parameters too, for which these are copied.
    """
    modules = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    tensors = _tensors(modules)
    values = [
        (tensor, tensor.detach().clone())
        for tensor in tensors.values()
        if not tensor.is_meta and not is_lazy(tensor) and (parameters or not isinstance(tensor, nn.Parameter))
    ]
    attributes = [dict(vars(part)) for part in modules]
    registries = [
        [(value, dict(value)) for value in map(vars(part).get, _REGISTRIES) if value is not None] for part in modules
    ]
    memo: dict[int, Any] = tensors | {id(part): part for part in modules}
    for part in modules:
        for name, value in list(vars(part).items()):
            if name not in _REGISTRIES and _holds_state(value):
                with suppress(Exception):  # an object that refuses to be copied stays as it is
                    vars(part)[name] = copy.deepcopy(value, memo)
    try:
        yield {id(tensor): value for tensor, value in values}
    finally:
        for part, before, own_registries in zip(modules, attributes, registries, strict=True):
            vars(part).clear()
            vars(part).update(before)
            for registry, entries in own_registries:
                registry.clear()
                registry.update(entries)
        with torch.no_grad():
            for tensor, value in values:
                _restore(tensor, value)


def _restore(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        tensor.data = value
    elif not torch.equal(tensor, value):  # a tensor that graphs hold counts its changes, so it is not changed in vain
        tensor.copy_(value)


_REGISTRIES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""Attributes of every module: its parameters, buffers, children and hooks, by name. They are restored in place."""


def numbers_kept(owner: object) -> dict[str, int | float]:
    """Returns the numbers among the attributes of an object and, if it is a module, of its parts, by path."""
    return {
        name: value
        for name, value in _attributes_kept(owner)
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def generators_kept(owner: object) -> dict[str, torch.Generator | random.Random]:
    """Returns the random generators that an object keeps as `numbers_kept`, by path."""
    return {
        name: value for name, value in _attributes_kept(owner) if isinstance(value, torch.Generator | random.Random)
    }


def tensors_kept(owner: object) -> dict[str, Tensor]:
    """Returns the tensors with values that an object keeps as `numbers_kept`, by path; also parameters and buffers."""
    found = {name: value for name, value in _attributes_kept(owner) if isinstance(value, Tensor)}
    if isinstance(owner, nn.Module):
        found |= dict(owner.named_parameters()) | dict(owner.named_buffers())
    return {name: value for name, value in found.items() if value.layout is torch.strided and not value.is_meta}


def _attributes_kept(owner: object) -> Iterator[tuple[str, object]]:
    parts = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
    for path, part in parts:
        for name, value in getattr(part, "__dict__", {}).items():
            yield f"{path}.{name}".lstrip("."), value


def generator_state(generator: torch.Generator | random.Random) -> object:
    """Returns the state of a random generator, which can be compared."""
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state().numpy().tobytes()


def attributes_of(module: nn.Module) -> Attributes:
    """Returns the attributes of the modules that are not torch's own, with copies of lists, dictionaries and sets."""
    own_code = (part for part in module.modules() if not type(part).__module__.startswith("torch."))
    return _copied([(part, plain_attributes(part)) for part in own_code])


def plain_attributes(part: nn.Module) -> dict[str, object]:
    """Returns the attributes of a module beside its parameters, buffers, children and hooks."""
    return {name: value for name, value in vars(part).items() if name not in _REGISTRIES}


def set_attributes(attributes: Attributes) -> None:
    """Gives modules the attributes that `attributes_of` returned."""
    for part, values in _copied(attributes):
        for name in plain_attributes(part).keys() - values.keys():
            del vars(part)[name]
        vars(part).update(values)


def _copied(attributes: Attributes) -> Attributes:
    """Returns attributes with copies of lists, dictionaries and sets: one of each, however many modules have it."""
    copies: dict[int, object] = {}

    def copied(value: object) -> object:
        if type(value) not in (list, dict, set):
            return value
        return copies.setdefault(id(value), copy.copy(value))

    return [(part, {name: copied(value) for name, value in values.items()}) for part, values in attributes]


def _tensors(modules: list[nn.Module]) -> dict[int, Tensor]:
    """Returns the parameters, buffers and other attributes of modules that are tensors, by id."""
    own = (value for part in modules for value in (*part.parameters(False), *part.buffers(False), *vars(part).values()))
    return {id(value): value for value in own if isinstance(value, Tensor)}


def _holds_state(value: object) -> bool:
    """Returns whether an attribute may change without being assigned; functions and classes are no such state."""
    if isinstance(value, nn.Module | Tensor | type) or callable(value):
        return False
    has_attributes = hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    return isinstance(value, _COPIED) or type(value).__module__.startswith("numpy.random") or has_attributes
