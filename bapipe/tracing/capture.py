"""Captures a module as a graph of operators: by torch.fx, else by torch.export, else with some modules as leaves."""

import contextlib
import copy
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export

from bapipe.errors import InvalidModel
from bapipe.torch_private import TreeSpec, is_compiled, tree_flatten, tree_leaves
from bapipe.tracing.model import attribute
from bapipe.tracing.sizes import repeat_to_batch

NO_GRAD = "no_grad"
"""Key in a node's `meta`: gradients were off when the operator ran."""

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip
_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


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
    """

    module: fx.GraphModule
    returned: tuple[Any, ...]
    spec: TreeSpec
    layer_of_call: dict[fx.Node, str]
    kinds: dict[str, str]
    leaf_reasons: Mapping[str, str] = field(default_factory=dict)


class _TracingFailed(Exception):
    """Tracing failed inside a module of the model; `path` is empty if it failed in the model's own forward."""

    def __init__(self, path: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.path, self.cause = path, cause


def capture(module: nn.Module, inputs: Sequence[Tensor] | None, leaf_modules: Sequence[str]) -> Captured:
    """Returns the operators of a module.

    torch.fx is tried first, because it keeps the model's modules and with them their hooks. It fails if the model's
    code depends on its inputs. Then torch.export is tried, which needs `inputs`, examples of any batch size. If that
    fails too, the modules in which torch.fx fails become leaf modules, one after another, until it does not.

    Args:
        leaf_modules: paths of modules to take as one layer each.

    Raises:
        InvalidModel: all of this fails; the message says where.
    """
    _check_has_layers(module)
    num_inputs = None if inputs is None else len(inputs)
    try:
        return _capture_with_fx(module, num_inputs, frozenset(leaf_modules))
    except _TracingFailed as error:
        first = error
    export_error = None
    if inputs is not None:
        try:
            return _capture_with_export(module, inputs, frozenset(leaf_modules))
        except Exception as error:  # whatever torch.export or the model's own code raises
            export_error = _first_line(error)
    reasons: dict[str, str] = {}
    failed = first
    while failed.path:
        reasons[failed.path] = f"it cannot be traced: {_first_line(failed.cause)}{_code_position(failed.cause)}"
        try:
            captured = _capture_with_fx(module, num_inputs, frozenset((*leaf_modules, *reasons)))
            return replace(captured, leaf_reasons=reasons)
        except _TracingFailed as error:
            failed = error
    reason = f"; torch.export fails too: {export_error}" if export_error is not None else ""
    raise InvalidModel(
        f"{type(module).__name__} cannot be traced: {_first_line(failed.cause)}{_code_position(failed.cause)}{reason}; "
        "its forward is traced without values, so it cannot branch on tensors: put such code into a module of its own, "
        "which is then one layer"
    ) from failed.cause


def _check_has_layers(module: nn.Module) -> None:
    has_no_layers = {
        "scripted by torch.jit": isinstance(module, torch.jit.ScriptModule),
        "compiled by torch.compile": is_compiled(module),
    }
    for how, is_so in has_no_layers.items():
        if is_so:
            raise InvalidModel(
                f"the module is {how}, so it has no layers to cut between: give the module that it was made from"
            )


def is_layer(module: nn.Module, path: str, leaf_modules: frozenset[str] = frozenset()) -> bool:
    """Returns whether a call of a module is one layer: it is of torch.nn, has no children, or is a leaf module."""
    if path in leaf_modules:
        return True
    if type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS):
        return True
    return next(module.children(), None) is None


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


def _capture_with_fx(module: nn.Module, num_inputs: int | None, leaf_modules: frozenset[str]) -> Captured:
    defaults = _default_arguments(module, num_inputs)
    tracer = _Tracer(leaf_modules)
    try:
        with torch.random.fork_rng(devices=[]):
            graph = tracer.trace(module, concrete_args=defaults)
    except Exception as error:  # whatever the model's own code raises on symbolic values
        raise _TracingFailed(tracer.failed_in or "", error) from error
    _drop_arguments(graph, defaults)
    _drop_unused(graph)
    output = _output(graph)
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
            layer_of_call[node] = _call_name(path, num_calls[path])
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


def _drop_unused(graph: fx.Graph) -> None:
    """Removes operators whose results are unused, except modules and operators that may write to memory."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("call_function", "call_method", "get_attr") or node.users or node.is_impure():
            continue
        if node.op != "call_method" or not str(node.target).endswith("_"):
            graph.erase_node(node)


def _capture_with_export(module: nn.Module, inputs: Sequence[Tensor], leaf_modules: frozenset[str]) -> Captured:
    # For a batch size of 1, torch.export would conclude that it is always 1.
    num_rows = max(2, *(len(example) for example in inputs))
    device = next(module.parameters(), inputs[0]).device
    examples = tuple(repeat_to_batch(example, num_rows, device) for example in inputs)
    batch = Dim("batch")
    with _silenced(), torch.random.fork_rng(devices=[]):
        program = export(
            _copy_sharing_memory(module), examples, dynamic_shapes=tuple({0: batch} for _ in examples), strict=False
        )
        source = program.module(check_guards=False)
    assert isinstance(source, fx.GraphModule)
    spec = program.call_spec.out_spec
    assert spec is not None
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    _inline(source, graph, env, no_grad=False)
    leaves = tree_leaves(_output(source.graph).args[0])
    returned = tuple(env[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    graph.output(returned)
    _drop_unused(graph)
    traced = fx.GraphModule(_state(module, source, graph), graph, type(module).__name__)
    layer_of_call, kinds = _layers_by_stack(module, graph, leaf_modules)
    for node in graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key == NO_GRAD}
    return Captured(module=traced, returned=returned, spec=spec, layer_of_call=layer_of_call, kinds=kinds)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discards logs, warnings and stderr; an error says enough."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _copy_sharing_memory(module: nn.Module) -> nn.Module:
    """Returns a copy with parameters and buffers of its own that share memory with the module's.

    torch.export leaves weak references to the parameters that it sees, and fake tensors in the lists of recurrent
    modules; the module itself must stay as it is.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach()
    return copy.deepcopy(module, memo)


def _state(module: nn.Module, source: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    """Returns the tensors that a graph reads, by name: the module's parameters and buffers, the export's constants."""
    tensors = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    targets = (str(node.target) for node in graph.nodes if node.op == "get_attr")
    return {target: tensors[target] if target in tensors else attribute(source, target) for target in targets}


def _inline(source: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, Any], no_grad: bool) -> None:
    """Copies the nodes of an exported graph; regions without gradients are inlined, and their nodes marked.

    Args:
        env: the copy of each node, which this fills; a list for a region with several results.
    """
    for node in source.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if node in env or node.op == "output" or any(check in name for check in _ASSERTIONS):
            continue
        if node.op == "call_module":
            assert not node.users, node  # a check of the inputs
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, body, *arguments = node.args
            inner = attribute(source, str(body.target))
            placeholders = [inner_node for inner_node in inner.graph.nodes if inner_node.op == "placeholder"]
            inner_env = {p: env.get(value, value) for p, value in zip(placeholders, arguments, strict=True)}
            _inline(inner, graph, inner_env, no_grad=not enabled)
            env[node] = [inner_env.get(leaf, leaf) for leaf in tree_leaves(_output(inner.graph).args[0])]
        elif name == "getitem" and isinstance(env.get(node.args[0]), list):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
            if no_grad:
                env[node].meta[NO_GRAD] = True


def _layers_by_stack(
    module: nn.Module, graph: fx.Graph, leaf_modules: frozenset[str]
) -> tuple[dict[fx.Node, str], dict[str, str]]:
    """Returns the layer of each operator inside a layer's module, by torch.export's module stacks, and their kinds."""
    modules = dict(module.named_modules(remove_duplicate=False))
    layer_of_call: dict[fx.Node, str] = {}
    kinds: dict[str, str] = {}
    names: dict[str, str] = {}  # of the layer of each call
    num_calls: dict[str, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if path and path in modules and is_layer(modules[path], path, leaf_modules):
                if key not in names:
                    num_calls[path] = num_calls.get(path, 0) + 1
                    names[key] = _call_name(path, num_calls[path])
                layer_of_call[node] = names[key]
                kinds[layer_of_call[node]] = type(modules[path]).__name__
                break
    return layer_of_call, kinds


def _output(graph: fx.Graph) -> fx.Node:
    output: fx.Node = next(node for node in graph.nodes if node.op == "output")
    return output


def _call_name(path: str, call: int) -> str:
    """Returns the name of the layer of a module's n-th call, counted from 1."""
    return path if call == 1 else f"{path}#{call}"


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _first_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"\s+", " ", text).strip()


def _code_position(error: Exception) -> str:
    """Returns where in the model's own code an error was raised, in brackets; empty if not in a forward."""
    position = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if trace.tb_frame.f_code.co_name == "forward" and not name.startswith("torch."):
            position = f" ({name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return position
