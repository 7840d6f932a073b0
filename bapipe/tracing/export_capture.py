"""Captures a module with torch.export, which follows more Python than torch.fx, down to operators."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.overrides import TorchFunctionMode

from bapipe.module_state.copies import deep_copy
from bapipe.module_state.python_random import all_generators_restored, global_generator_states
from bapipe.torch_private.tensors import tree_leaves
from bapipe.tracing.captured import NO_GRAD, Captured, call_name, check_writes, drop_unused, output_node
from bapipe.tracing.kept_calls import DRAWS_IN_PYTHON, CannotKeep, functions_refused
from bapipe.tracing.layer_choice import LayerChoice
from bapipe.tracing.model import attribute
from bapipe.tracing.reasons import Reason
from bapipe.tracing.seeding import SEEDS_ITSELF, default_generator_is_seeded, generators_watched, seeding_noticed
from bapipe.tracing.sizes import repeat_to_batch

_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


def capture_with_export(module: nn.Module, inputs: Sequence[Tensor], choice: LayerChoice) -> Captured:
    # For a batch size of 1, torch.export would conclude that it is always 1.
    num_rows = max(2, *(len(example) for example in inputs))
    device = next(module.parameters(), inputs[0]).device
    examples = tuple(repeat_to_batch(example, num_rows, device) for example in inputs)
    batch = Dim("batch")
    before = global_generator_states()
    copied = _copy_sharing_memory(module)
    with (
        silenced(),
        all_generators_restored(),
        functions_refused(),
        seeding_noticed(_refuse_seeding, restoring=False),  # torch.export restores the state itself
        generators_watched(copied) as generator_fault,
        _GeneratorsRefused(generator_fault),
    ):
        program = export(copied, examples, dynamic_shapes=tuple({0: batch} for _ in examples), strict=False)
        if default_generator_is_seeded():
            _refuse_seeding()
        source = program.module(check_guards=False)
        if global_generator_states() != before:
            raise CannotKeep({"": DRAWS_IN_PYTHON})
    assert isinstance(source, fx.GraphModule)
    spec = program.call_spec.out_spec
    assert spec is not None
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    _inline(source, graph, env, no_grad=False)
    leaves = tree_leaves(output_node(source.graph).args[0])
    returned = tuple(env[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    graph.output(returned)
    traced = fx.GraphModule(_state(module, source, graph), graph, type(module).__name__)
    drop_unused(traced)
    layer_of_call, kinds = _layers_by_stack(module, graph, choice)
    outside = (node for node in graph.nodes if node not in layer_of_call and node.meta.get("nn_module_stack"))
    check_writes(traced, {node: next(reversed(node.meta["nn_module_stack"].values()))[0] for node in outside})
    for node in graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key == NO_GRAD}
    return Captured(module=traced, returned=returned, spec=spec, layer_of_call=layer_of_call, kinds=kinds)


def _refuse_seeding() -> None:
    raise CannotKeep({"": SEEDS_ITSELF})


class _GeneratorsRefused(TorchFunctionMode):
    """Raises CannotKeep where a forward draws from a generator that a graph cannot draw from."""

    def __init__(self, fault: Callable[[object], Reason | None]) -> None:
        super().__init__()
        self._fault = fault

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fault = self._fault((kwargs or {}).get("generator"))
        if fault is not None:
            raise CannotKeep({"": fault})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def silenced() -> Iterator[None]:
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
    return deep_copy(module, memo)


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
            env[node] = [inner_env.get(leaf, leaf) for leaf in tree_leaves(output_node(inner.graph).args[0])]
        elif name == "getitem" and isinstance(env.get(node.args[0]), list):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
            if no_grad:
                env[node].meta[NO_GRAD] = True


def _layers_by_stack(
    module: nn.Module, graph: fx.Graph, choice: LayerChoice
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
            if path and path in modules and choice.is_layer(modules[path], path):
                if key not in names:
                    num_calls[path] = num_calls.get(path, 0) + 1
                    names[key] = call_name(path, num_calls[path])
                layer_of_call[node] = names[key]
                kinds[layer_of_call[node]] = type(modules[path]).__name__
                break
    return layer_of_call, kinds
