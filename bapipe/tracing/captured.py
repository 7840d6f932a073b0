"""A graph of a module's operators, however it was captured."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from bapipe.device_types import DEVICE_TYPES
from bapipe.torch_private.tensors import TreeSpec
from bapipe.tracing.aliasing import changes_in_place, writes_to_state
from bapipe.tracing.kept_calls import CannotKeep, registers_hook
from bapipe.tracing.reasons import WRITE_INSIDE, Reason

NO_GRAD = "no_grad"
"""Key in a node's `meta`: gradients were off when the operator ran."""

AUTOCAST = "autocast"
"""Key in a node's `meta`: the `Autocast` in which the operator ran, if that was not the mode of the whole trace."""


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast mode of one kind of device."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


def autocast_modes() -> dict[str, Autocast]:
    """Returns the modes in which operators run now, by kind of device."""
    return {
        kind: Autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in DEVICE_TYPES
    }


def autocast_of_training(dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Returns the context of code that is to find autocast as it trains in: on everywhere, or as it is for None."""
    return nullcontext() if dtype is None else autocast_everywhere(dtype)


def autocast_everywhere(dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Turns autocast on for every kind of device, or off if `dtype` is None.

    `torch.autocast` does so for one kind, and not for a GPU where there is none. Nothing that was cast is kept.
    """
    modes = autocast_modes().values()
    return autocast_as({m.device_type: Autocast(m.device_type, dtype or m.dtype, dtype is not None) for m in modes})


@contextmanager
def autocast_as(modes: Mapping[str, Autocast]) -> Iterator[None]:
    """In this context operators run in these modes, by kind of device; nothing that was cast is kept."""
    before, cached = autocast_modes(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    _set_autocast(modes)
    try:
        yield
    finally:
        _set_autocast(before)
        torch.set_autocast_cache_enabled(cached)


def _set_autocast(modes: Mapping[str, Autocast]) -> None:
    for kind, mode in modes.items():
        torch.set_autocast_enabled(kind, mode.enabled)
        torch.set_autocast_dtype(kind, mode.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A graph of a module's operators.

    Attributes:
        module: a module with that graph; it returns what the forward returns as a flat tuple.
        returned: the nodes and constants in that tuple.
        spec: how the forward nests them.
        layer_of_call: the layer of each operator inside the call of a layer's module; others are between layers.
        kinds: class of the module of each layer.
        leaf_reasons: why modules that the caller did not name are leaf modules, by path.
        sizes: numbers, and shapes of tensors, at two batch sizes, if capturing found them: see `bapipe.tracing.sizes`.
    """

    module: fx.GraphModule
    returned: tuple[Any, ...]
    spec: TreeSpec
    layer_of_call: dict[fx.Node, str]
    kinds: dict[str, str]
    leaf_reasons: Mapping[str, Reason] = field(default_factory=dict)
    sizes: Mapping[fx.Node, tuple[Any, Any]] | None = None


def output_node(graph: fx.Graph) -> fx.Node:
    output: fx.Node = next(node for node in graph.nodes if node.op == "output")
    return output


def call_name(path: str, call: int) -> str:
    """Returns the name of the layer of a module's n-th call, counted from 1; no path has a `#` itself."""
    return path if call == 1 else f"{path}#{call}"


def drop_unused(module: fx.GraphModule) -> None:
    """Removes operators whose results are unused, except modules, hooks and operators that may write to memory."""
    for node in reversed(list(module.graph.nodes)):
        if node.op not in ("call_function", "call_method", "get_attr") or node.users or node.is_impure():
            continue
        if node.op == "get_attr" or not (registers_hook(node.target) or changes_in_place(module, node)):
            module.graph.erase_node(node)


def check_writes(module: fx.GraphModule, path_of_node: Mapping[fx.Node, str]) -> None:
    """Raises CannotKeep if the forwards of modules write to parameters or buffers.

    Args:
        path_of_node: the path of the module in whose forward an operator is; none for those inside a layer.
    """
    reasons: dict[str, Reason] = {}
    for node, names in writes_to_state(module):
        path = _enclosing(path_of_node.get(node, ""), names)
        if path:
            reasons.setdefault(path, Reason(f"its forward changes '{names[0]}'", WRITE_INSIDE))
    if reasons:
        raise CannotKeep(reasons)


def _enclosing(path: str, names: Iterable[str]) -> str:
    """Returns the path of the innermost module at or around a path that holds all of some parameters and buffers."""
    while path and not all(name.startswith(f"{path}.") for name in names):
        path = path.rpartition(".")[0]
    return path
