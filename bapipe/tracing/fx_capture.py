"""Captures a module with torch.fx, which keeps its modules and with them their hooks."""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import fx, nn

from bapipe.torch_private import tree_flatten
from bapipe.tracing.captured import NO_GRAD, Captured, call_name, drop_unused, is_layer, output_node


class TracingFailed(Exception):
    """Tracing failed inside a module of the model; `path` is empty if it failed in the model's own forward."""

    def __init__(self, path: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.path, self.cause = path, cause


class _Tracer(fx.Tracer):
    """torch.fx's tracer, which also records where gradients are off, and in which module it failed."""

    def __init__(self, leaf_modules: frozenset[str]) -> None:
        super().__init__()
        self._leaf_modules = leaf_modules
        self._grad, self._autocast = torch.is_grad_enabled(), _autocast()
        self.failed_in: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_layer(m, module_qualified_name, self._leaf_modules)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed_in is None:
                self.failed_in = self.path_of_module(m)
            raise

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if _autocast() != self._autocast:
            raise RuntimeError("the forward changes autocast, which torch.fx does not record")
        if self._grad and not torch.is_grad_enabled():
            node.meta[NO_GRAD] = True
        return node


def capture_with_fx(module: nn.Module, num_inputs: int | None, leaf_modules: frozenset[str]) -> Captured:
    defaults = _default_arguments(module, num_inputs)
    tracer = _Tracer(leaf_modules)
    try:
        with torch.random.fork_rng(devices=[]):
            graph = tracer.trace(module, concrete_args=defaults)
    except Exception as error:  # whatever the model's own code raises on symbolic values
        raise TracingFailed(tracer.failed_in or "", error) from error
    _drop_arguments(graph, defaults)
    drop_unused(graph)
    output = output_node(graph)
    returned, spec = tree_flatten(output.args[0])
    output.args = (tuple(returned),)
    traced = fx.GraphModule(module, graph)
    layer_of_call: dict[fx.Node, str] = {}
    kinds: dict[str, str] = {}
    num_calls: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            path = str(node.target)
            num_calls[path] = num_calls.get(path, 0) + 1
            layer_of_call[node] = call_name(path, num_calls[path])
            kinds[layer_of_call[node]] = type(module.get_submodule(path)).__name__
    return Captured(module=traced, returned=tuple(returned), spec=spec, layer_of_call=layer_of_call, kinds=kinds)


def _default_arguments(module: nn.Module, num_inputs: int | None) -> dict[str, Any]:
    """Returns the defaults of the arguments of `forward` after the first `num_inputs`."""
    if num_inputs is None:
        return {}
    parameters = list(signature(module.forward).parameters.values())
    return {p.name: p.default for p in parameters[num_inputs:] if p.default is not Parameter.empty}


def _drop_arguments(graph: fx.Graph, defaults: Mapping[str, Any]) -> None:
    """Removes the placeholders of arguments with defaults, and torch.fx's assertions that they have these."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target).rpartition("_")[0] in defaults:
            checks = [node]
            for check in checks:
                checks += [user for user in check.users if user not in checks]
            for check in reversed(checks):
                graph.erase_node(check)


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
