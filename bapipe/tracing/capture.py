"""Captures a module as a graph of operators: by torch.fx, else by torch.export, else with some modules as leaves."""

import contextlib
import copy
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Key in a node's `meta`: the operator ran where gradients were off."""

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A graph of a module's operators.

    Attributes:
        module: a module with that graph, which returns a flat tuple of what the forward does.
        returned: the nodes and constants that are the leaves of what the forward returns.
        spec: how it nests them.
        called: the name of the layer that an operator belongs to by the code of the model; others are in between.
        kinds: class of the module of each layer.
    """

    module: fx.GraphModule
    returned: tuple[Any, ...]
    spec: TreeSpec
    called: dict[fx.Node, str]
    kinds: dict[str, str]


class _Failed(Exception):
    """Tracing failed inside a module of the model; `path` is empty where it failed in the model's own forward."""

    def __init__(self, path: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.path, self.cause = path, cause


def capture(module: nn.Module, inputs: Sequence[Tensor] | None, leaf_modules: Sequence[str]) -> Captured:
    """Returns the operators of a module.

    torch.fx comes first, since it keeps the model's own modules and so their hooks. torch.export follows where the
    model's code looks at its inputs; it needs `inputs`, examples of any batch size. Where that fails too, the modules
    whose code stops torch.fx are leaf modules.

    Args:
        leaf_modules: paths of modules to take as one layer each.

    Raises:
        InvalidModel: nothing of this works; the message says where each stopped.
    """
    _check_open(module)
    num_inputs = None if inputs is None else len(inputs)
    try:
        return _by_fx(module, num_inputs, frozenset(leaf_modules))
    except _Failed as error:
        first = error
    exported = None
    if inputs is not None:
        try:
            return _by_export(module, inputs, frozenset(leaf_modules))
        except Exception as error:  # whatever torch.export or the model's own code raises
            exported = _line(error)
    closed = set(leaf_modules)
    failed = first
    while failed.path:
        closed.add(failed.path)
        try:
            return _by_fx(module, num_inputs, frozenset(closed))
        except _Failed as error:
            failed = error
    reason = f"; torch.export fails too: {exported}" if exported is not None else ""
    raise InvalidModel(
        f"{type(module).__name__} cannot be traced: {_line(failed.cause)}{_where(failed.cause)}{reason}; its forward "
        "is traced without values, so it cannot branch on tensors: put such code into a module of its own, which is "
        "then one layer"
    ) from failed.cause


def _check_open(module: nn.Module) -> None:
    closed = {
        "scripted by torch.jit": isinstance(module, torch.jit.ScriptModule),
        "compiled by torch.compile": is_compiled(module),
    }
    for how, found in closed.items():
        if found:
            raise InvalidModel(f"the module is {how}, so it has no layers to tell apart: give the one it was made from")


def is_layer(module: nn.Module, path: str, leaf_modules: frozenset[str] = frozenset()) -> bool:
    """Returns whether a call of a module is one layer: a module of torch.nn, one without children, or one named."""
    if path in leaf_modules:
        return True
    if type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS):
        return True
    return next(module.children(), None) is None


class _Tracer(fx.Tracer):
    """torch.fx's tracer, which also keeps where gradients are off, and in which module it failed."""

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


def _by_fx(module: nn.Module, num_inputs: int | None, leaf_modules: frozenset[str]) -> Captured:
    fixed = _defaults(module, num_inputs)
    tracer = _Tracer(leaf_modules)
    try:
        with torch.random.fork_rng(devices=[]):
            graph = tracer.trace(module, concrete_args=fixed)
    except Exception as error:  # whatever the model's own code raises on symbolic values
        raise _Failed(tracer.failed_in or "", error) from error
    _drop(graph, fixed)
    _drop_unused(graph)
    output = _output(graph)
    returned, spec = tree_flatten(output.args[0])
    output.args = (tuple(returned),)
    made = fx.GraphModule(module, graph)
    called: dict[fx.Node, str] = {}
    kinds: dict[str, str] = {}
    calls: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            path = str(node.target)
            calls[path] = calls.get(path, 0) + 1
            called[node] = _numbered(path, calls[path])
            kinds[called[node]] = type(module.get_submodule(path)).__name__
    return Captured(module=made, returned=tuple(returned), spec=spec, called=called, kinds=kinds)


def _defaults(module: nn.Module, num_inputs: int | None) -> dict[str, Any]:
    """The arguments of `forward` beyond the inputs given, which keep their defaults."""
    if num_inputs is None:
        return {}
    parameters = list(signature(module.forward).parameters.values())
    return {p.name: p.default for p in parameters[num_inputs:] if p.default is not Parameter.empty}


def _drop(graph: fx.Graph, fixed: Mapping[str, Any]) -> None:
    """Removes the placeholders of arguments that keep their defaults, and the checks that they do."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target).rpartition("_")[0] in fixed:
            checks = [node]
            for check in checks:
                checks += [user for user in check.users if user not in checks]
            for check in reversed(checks):
                graph.erase_node(check)


def _drop_unused(graph: fx.Graph) -> None:
    """Removes operators whose results nobody uses; modules, and what may write to memory, stay."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("call_function", "call_method", "get_attr") or node.users or node.is_impure():
            continue
        if node.op != "call_method" or not str(node.target).endswith("_"):
            graph.erase_node(node)


def _by_export(module: nn.Module, inputs: Sequence[Tensor], leaf_modules: frozenset[str]) -> Captured:
    # Of a batch of one, torch.export would conclude that it always is one.
    num_rows = max(2, *(len(example) for example in inputs))
    where = next(module.parameters(), inputs[0]).device
    examples = tuple(repeat_to_batch(example, num_rows, where) for example in inputs)
    batch = Dim("batch")
    with _silence(), torch.random.fork_rng(devices=[]):
        program = export(_twin(module), examples, dynamic_shapes=tuple({0: batch} for _ in examples), strict=False)
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
    made = fx.GraphModule(_state(module, source, graph), graph, type(module).__name__)
    called, kinds = _by_call(module, graph, leaf_modules)
    for node in graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key == NO_GRAD}
    return Captured(module=made, returned=returned, spec=spec, called=called, kinds=kinds)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Of what fails, the error says enough."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _twin(module: nn.Module) -> nn.Module:
    """A copy with parameters and buffers of its own over the same memory.

    torch.export leaves weak references to those it sees, and stand-ins in the lists that recurrent modules keep.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach()
    return copy.deepcopy(module, memo)


def _state(module: nn.Module, source: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    """What a graph reads, by name: the module's own parameters and buffers, and the constants of its twin's export."""
    own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    targets = (str(node.target) for node in graph.nodes if node.op == "get_attr")
    return {target: own[target] if target in own else attribute(source, target) for target in targets}


def _inline(source: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, Any], no_grad: bool) -> None:
    """Copies the nodes of an exported graph, those of regions without gradients marked and in line."""
    for node in source.graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if node in env or node.op == "output" or any(check in name for check in _CHECKS):
            continue
        if node.op == "call_module":
            assert not node.users, node  # a check of the inputs
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, body, *arguments = node.args
            inner = attribute(source, str(body.target))
            places = [given for given in inner.graph.nodes if given.op == "placeholder"]
            own = {place: env.get(value, value) for place, value in zip(places, arguments, strict=True)}
            _inline(inner, graph, own, no_grad=not enabled)
            env[node] = [own.get(leaf, leaf) for leaf in tree_leaves(_output(inner.graph).args[0])]
        elif name == "getitem" and isinstance(env.get(node.args[0]), list):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
            if no_grad:
                env[node].meta[NO_GRAD] = True


def _by_call(
    module: nn.Module, graph: fx.Graph, leaf_modules: frozenset[str]
) -> tuple[dict[fx.Node, str], dict[str, str]]:
    """Returns the layer of each operator that a layer's module calls, by the stack that torch.export wrote down."""
    modules = dict(module.named_modules(remove_duplicate=False))
    called: dict[fx.Node, str] = {}
    kinds: dict[str, str] = {}
    names: dict[str, str] = {}
    calls: dict[str, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if path and path in modules and is_layer(modules[path], path, leaf_modules):
                if key not in names:
                    calls[path] = calls.get(path, 0) + 1
                    names[key] = _numbered(path, calls[path])
                called[node] = names[key]
                kinds[called[node]] = type(modules[path]).__name__
                break
    return called, kinds


def _output(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(node for node in graph.nodes if node.op == "output")
    return found


def _numbered(path: str, call: int) -> str:
    return path if call == 1 else f"{path}#{call}"


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"\s+", " ", text).strip()


def _where(error: Exception) -> str:
    """Returns the line of the model's own code at which it stopped."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if trace.tb_frame.f_code.co_name == "forward" and not name.startswith("torch."):
            place = f" ({name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return place
