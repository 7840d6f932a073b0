"""How calls of torch's functions are written as nodes of a graph."""

import inspect
import operator
import re
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (
    bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis),
    range,
)  # fmt: skip
"""Types of arguments that a graph holds as they are."""

_METHODS: dict[Any, str] = {method: name for name, method in inspect.getmembers(Tensor, inspect.isroutine)}
"""Names of a tensor's methods. Some have another `__name__`, under which generated code would not find them: the
operator `**` is `Tensor.__pow__`, whose `__name__` is `pow`.
"""


def node_target(func: Any) -> tuple[str, Any] | None:
    """Returns op and target of the node that calls a function of torch."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        attribute = getattr(func.__self__, "__name__", "")
        return ("call_function", plain_function(func, f"{name.strip('_')}_{attribute}"))
    if name == "__getitem__":
        return ("call_function", operator.getitem)
    if name == "__setitem__":
        return ("call_function", set_item)
    if getattr(Tensor, name, None) is func:
        return ("call_method", name)
    if func in _METHODS:
        return ("call_method", _METHODS[func])
    return ("call_function", func)


def writes_to_a_list(function: object) -> bool:
    """Returns whether a function of torch writes to each tensor of its first argument, as `torch._foreach_add_`."""
    name = getattr(function, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_")


def set_item(tensor: Tensor, key: Any, value: Any) -> Tensor:
    """Writes to a part of a tensor; returns the tensor, so that later uses of it come after this one in a graph."""
    tensor[key] = value
    return tensor


def plain_function(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a function that calls another callable; torch.fx graphs can call plain functions only."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    function.__name__ = function.__qualname__ = re.sub(r"\W", "_", name)
    return function


def argument_names(module: nn.Module, count: int) -> list[str]:
    """Returns the names of the first arguments of a module's forward."""
    names: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(count - len(names))]
        elif parameter.kind is not Parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names[:count]
