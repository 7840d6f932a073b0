"""Captures a module with torch.fx, which keeps its modules and with them their hooks."""

import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict
from torch.overrides import TorchFunctionMode

from bapipe.module_state.code_state import CountedCode, Variable, reaches
from bapipe.module_state.python_random import all_generators_restored, global_generator_states
from bapipe.module_state.python_state import attributes_of, state_restored
from bapipe.torch_private.autograd_functions import Function, apply_function
from bapipe.torch_private.tensors import tree_flatten, tree_leaves, tree_map
from bapipe.tracing.asked_class import UnknownValue
from bapipe.tracing.captured import (
    AUTOCAST,
    NO_GRAD,
    Captured,
    autocast_modes,
    call_name,
    check_writes,
    drop_unused,
    output_node,
)  # fmt: skip
from bapipe.tracing.kept_calls import (
    ASSIGNS_DATA,
    DRAWS_IN_PYTHON,
    CannotKeep,
    assigns_data,
    function_operator,
    functions_intercepted,
    hook_operator,
)  # fmt: skip
from bapipe.tracing.layer_arguments import check_arguments
from bapipe.tracing.layer_choice import LayerChoice
from bapipe.tracing.randomness import draws_random_numbers
from bapipe.tracing.reasons import RETURN_VALUES, SETS_UP_AT_FIRST, Reason
from bapipe.tracing.seeding import SEEDS_ITSELF, default_generator_is_seeded, generators_watched, seeding_noticed

_SIZES = frozenset(
    ("size", "dim", "ndimension", "stride", "numel", "nelement", "__len__", "is_contiguous", "is_floating_point",
     "is_complex", "get_device", "element_size", "type", "__hash__", "__repr__", "__format__")
)  # fmt: skip
"""Methods of a tensor that do not read its values, which tracing may call."""


class TracingFailed(Exception):
    """Tracing failed inside a module of the model; `path` is empty if it failed in the model's own forward.

    `reasons` says why other modules had to become leaf modules before, by path.
    """

    def __init__(self, path: str, cause: Exception, reasons: Mapping[str, Reason] | None = None) -> None:
        super().__init__(str(cause))
        self.path, self.cause, self.reasons = path, cause, dict(reasons or {})


class _Tracer(fx.Tracer):
    """torch.fx's tracer, which also records where gradients are off, autocast, functions with a backward of their own,
    hooks on tensors, and in which module it failed.
    """

    def __init__(self, choice: LayerChoice) -> None:
        super().__init__(param_shapes_constant=True)
        self.choice = choice
        self._grad, self._autocast = torch.is_grad_enabled(), autocast_modes()
        self._failed: tuple[str, Exception] | None = None
        self.path_of_node: dict[fx.Node, str] = {}
        self._proxies: list[fx.Proxy] = []
        self.generator_fault: Callable[[object], Reason | None] = lambda value: None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.choice.is_layer(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before, caller = global_generator_states(), self.path()
        try:
            if self.is_leaf_module(m, self.path_of_module(m)):
                check_arguments(m, args, kwargs)
            result = super().call_module(m, forward, args, kwargs)
            if global_generator_states() != before:
                raise CannotKeep({self.path_of_module(m): DRAWS_IN_PYTHON})
            self._check_seeding(self.path_of_module(m))
            return result
        except Exception as error:
            if self.failed_in(error) is None:
                # A layer's forward does not run here: what fails is the call, in code around it.
                path = self.path_of_module(m)
                self._failed = caller if self.is_leaf_module(m, path) else path, error
            raise

    def failed_in(self, error: Exception) -> str | None:
        """Returns the path of the module in whose forward an error was raised; None if that is not known.

        Code around that module may have caught an earlier one.
        """
        return self._failed[0] if self._failed is not None and self._failed[1] is error else None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return UnknownValue(node, self)

    def create_arg(self, a: Any) -> Any:
        if is_dataclass(a) or (isinstance(a, dict) and type(a) not in (dict, immutable_dict)):
            raise RuntimeError(f"torch.fx takes a {type(a).__name__} for a dictionary")
        if type(a).__module__ == "numpy" and getattr(a, "ndim", None) == 0:
            a = a.item()  # the code of a graph does not import numpy
        fault = self.generator_fault(a)
        if fault is not None:
            raise CannotKeep({self.path(): fault})
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        self._check_seeding(self.path())
        node = super().create_node(*args, **kwargs)
        self.path_of_node[node] = self.path()
        if self._grad and not torch.is_grad_enabled():
            node.meta[NO_GRAD] = True
        changed = [mode for kind, mode in autocast_modes().items() if mode != self._autocast[kind]]
        if changed:
            node.meta[AUTOCAST] = changed[0]
        return node

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> fx.Proxy:
        if kind == "call_method" and target == "register_hook":
            tensor, hook = args
            kind, target, args, kwargs = "call_function", hook_operator(hook), (tensor,), {}
        proxy: fx.Proxy = super().create_proxy(kind, target, args, kwargs, *more, **options)
        self._proxies.append(proxy)
        return proxy

    def check_assigned(self) -> None:
        """Raises CannotKeep if a forward has assigned `data` of tensors: what stands for them has it then."""
        for proxy in self._proxies:
            if "data" in vars(proxy):
                raise CannotKeep({self.path_of_node[proxy.node]: ASSIGNS_DATA})

    def apply_function(self, cls: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call of an autograd function, whose backward torch.fx would lose."""
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return apply_function(cls, args, kwargs)
        if any(isinstance(leaf, nn.Module) for leaf in leaves):  # whose parameters would belong to no layer
            raise CannotKeep({self.path(): Reason(f"it gives modules to {cls.__name__}")})
        return self.create_proxy("call_function", function_operator(cls), args, kwargs)

    def seeds(self) -> None:
        """Raises CannotKeep: the running forward seeds random numbers."""
        raise CannotKeep({self.path(): SEEDS_ITSELF})

    def _check_seeding(self, path: str) -> None:
        """Raises CannotKeep if the module at a path has seeded the default generator by the generator's own methods."""
        if default_generator_is_seeded():
            raise CannotKeep({path: SEEDS_ITSELF})

    def texts(self) -> list[tuple[str, ...]]:
        """Returns for each operator the path of the module in whose forward it is, and what identifies it."""
        return [
            (path, node.op, getattr(node.target, "__name__", str(node.target)), str(node.args), str(node.kwargs))
            for node, path in self.path_of_node.items()
        ]

    def path(self) -> str:
        """Returns the path of the module whose forward runs."""
        return str(next(reversed(self.module_stack.values()))[0]) if self.module_stack else ""


class _StateCalls(TorchFunctionMode):
    """Records operators that read no value of the batch but must run at every call: on the module's own tensors, and
    random ones.

    torch.fx would run them once, while it traces, and keep their results.
    """

    def __init__(self, tracer: _Tracer, root: nn.Module) -> None:
        super().__init__()
        self._tracer = tracer
        plain = ((f"{path}.{name}".lstrip("."), v) for path, m in root.named_modules() for name, v in vars(m).items())
        named = (*plain, *root.named_buffers(), *root.named_parameters())
        self._names = {id(value): name for name, value in named if isinstance(value, Tensor)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        name = getattr(func, "__name__", "")
        if any(id(leaf) in self._names for leaf in leaves):
            return self._on_state(func, name, args, kwargs)
        if draws_random_numbers(func) and not any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return self._tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)

    def _on_state(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _SIZES:
            return func(*args, **kwargs)
        if assigns_data(func):
            raise CannotKeep({self._tracer.path(): ASSIGNS_DATA})
        if name == "__get__":
            value = func(*args, **kwargs)
            return getattr(self._proxy(args[0]), func.__self__.__name__) if isinstance(value, Tensor) else value
        args, kwargs = tree_map(self._proxy, (args, kwargs))
        if not args or not isinstance(args[0], fx.Proxy) or getattr(Tensor, name, None) is not func:
            return func(*args, **kwargs)
        if name.startswith("__r") and hasattr(operator, f"__{name[3:]}"):
            return getattr(operator, f"__{name[3:]}")(args[1], args[0])
        if name.startswith("__") and hasattr(operator, name):
            return getattr(operator, name)(*args)
        return getattr(args[0], name)(*args[1:], **kwargs)

    def _proxy(self, value: Any) -> Any:
        if id(value) not in self._names:
            return value
        return self._tracer.create_proxy("get_attr", self._names[id(value)], (), {})


def capture_with_fx(module: nn.Module, num_inputs: int | None, choice: LayerChoice) -> Captured:
    """Returns the operators of a module.

    Raises:
        TracingFailed: the model's code cannot run without values.
        CannotKeep: a graph would not do what the code of some modules does.
    """
    defaults = _default_arguments(module, num_inputs)
    with state_restored(module):
        tracer, counts, outside = _Tracer(choice), _counts(module), CountedCode(module)
        graph = _trace(tracer, module, defaults)
        outside.count()
        texts = tracer.texts()
        _drop_arguments(graph, defaults, _num_named(module, num_inputs))
        _drop_star_arguments(graph)
        output = output_node(graph)
        returned, spec = tree_flatten(_plain(output.args[0]))
        output.args = (tuple(returned),)
        traced = fx.GraphModule(module, graph)
        again, third = _Tracer(choice), _Tracer(choice)
        _check_second_trace(texts, again, third, module, defaults, outside, is_counting=_counts(module) != counts)
    drop_unused(traced)
    check_writes(traced, tracer.path_of_node)
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


def _trace(tracer: _Tracer, module: nn.Module, defaults: dict[str, Any]) -> fx.Graph:
    """Returns the graph of a module; tensors of its own that the forward assigns stay assigned."""
    buffers = {path: dict(part.named_buffers(recurse=False)) for path, part in module.named_modules()}
    try:
        with (
            all_generators_restored(),
            functions_intercepted(tracer.apply_function),
            generators_watched(module) as tracer.generator_fault,
            seeding_noticed(tracer.seeds),
            _StateCalls(tracer, module),
        ):
            before = global_generator_states()
            graph: fx.Graph = tracer.trace(module, concrete_args=defaults)
            if global_generator_states() != before:
                raise CannotKeep({"": DRAWS_IN_PYTHON})
            tracer.check_assigned()
    except CannotKeep:
        raise
    except Exception as error:  # whatever the model's own code raises on symbolic values
        raise TracingFailed(tracer.failed_in(error) or "", error) from error
    for path, own in buffers.items():
        now = dict(vars(module.get_submodule(path))["_buffers"])
        assigned = [name for name in own if now.get(name) is not own[name]]
        if assigned:
            raise CannotKeep(_assigning(tracer, module, path, assigned[0]))
    return graph


def _assigning(tracer: _Tracer, root: nn.Module, owner: str, name: str) -> dict[str, Reason]:
    """Returns which module's forward assigns a buffer: code around its owner if that is a layer, which did not run."""
    path, buffer = owner, name
    while path and tracer.choice.is_layer(root.get_submodule(path), path):
        path, buffer = path.rpartition(".")[0], f"{owner}.{name}"
    to_cut = "write to the buffer in place, as by `copy_`, in the forward of the innermost module that has it"
    return {path: Reason(f"its forward assigns the buffer '{buffer}'", to_cut)}


def _check_second_trace(
    first: Sequence[tuple[str, ...]],
    tracer: _Tracer,
    third: _Tracer,
    module: nn.Module,
    defaults: dict[str, Any],
    outside: CountedCode,
    *,
    is_counting: bool,
) -> None:
    """Raises CannotKeep if a forward does something else at its second call: it keeps state in Python.

    If that is the model's own forward, there is no module that could be one layer. It may only have made a table that
    it needs again, unless it counts. A number outside of modules that it counts with is state of each module whose
    forward reaches it, whatever the forward does with it.
    """
    path = _first_different(first, tracer, module, defaults)
    outside.count()
    changed = outside.changed(lengths=path is not None)
    reason = Reason(f"its forward keeps state from call to call{_named(changed)}", RETURN_VALUES)
    if path is not None and not changed and _first_different(tracer.texts(), third, module, defaults) is None:
        reason = SETS_UP_AT_FIRST
    if path or (path == "" and (is_counting or changed)):
        raise CannotKeep({path: reason})
    if changed:
        traced = {p: m for p, m in module.named_modules() if not (p and tracer.is_leaf_module(m, p))}
        raise CannotKeep({p: reason for p, m in traced.items() if reaches(m, changed[0])} or {"": reason})


def _first_different(
    before: Sequence[tuple[str, ...]], tracer: _Tracer, module: nn.Module, defaults: dict[str, Any]
) -> str | None:
    """Traces once more; returns the path of the first module that does something else than before, None if none."""
    for name in [name for name in vars(module) if name.startswith("_tensor_constant")]:
        delattr(module, name)  # the next trace shall give the same names
    try:
        _trace(tracer, module, defaults)
    except TracingFailed as error:
        return error.path
    return next((text[0] for text, other in zip(tracer.texts(), before, strict=False) if text != other), None)


def _named(changed: Sequence[Variable]) -> str:
    return f", in {changed[0].what}" if changed else ""


def _counts(module: nn.Module) -> list[float]:
    """Returns the numbers, and the lengths of lists, among the attributes of a module's parts."""
    values = [value for _, attributes in attributes_of(module) for value in attributes.values()]
    lengths = [float(len(value)) for value in values if isinstance(value, list | dict | set | deque)]
    return lengths + [float(value) for value in values if isinstance(value, int | float)]


def _plain(value: Any) -> Any:
    """Returns a result of the forward in lists, dictionaries and named tuples, of which torch.fx made its own."""
    if isinstance(value, fx.Node):
        made: Any = value.target
        is_named_tuple = isinstance(made, type) and issubclass(made, tuple)
        return made(*map(_plain, value.args)) if is_named_tuple else value
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _default_arguments(module: nn.Module, num_inputs: int | None) -> dict[str, Any]:
    """Returns the defaults of the arguments of `forward` after the first `num_inputs`."""
    if num_inputs is None:
        return {}
    parameters = list(signature(module.forward).parameters.values())
    return {p.name: p.default for p in parameters[num_inputs:] if p.default is not Parameter.empty}


def _num_named(module: nn.Module, num_inputs: int | None) -> int:
    """Returns how many of the inputs of `forward` have an argument each, before those that keep their defaults."""
    parameters = list(signature(module.forward).parameters.values())[:num_inputs]
    return sum(parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for parameter in parameters)


def _drop_arguments(graph: fx.Graph, defaults: Mapping[str, Any], num_named: int) -> None:
    """Removes the placeholders of arguments with defaults, and torch.fx's assertions that they have these.

    torch.fx names such a placeholder by the argument and a number, which may be the name of an input before it.
    """
    for node in [node for node in graph.nodes if node.op == "placeholder"][num_named:]:
        if str(node.target).rpartition("_")[0] in defaults:
            checks = [node]
            for check in checks:
                checks += [user for user in check.users if user not in checks]
            for check in reversed(checks):
                graph.erase_node(check)


def _drop_star_arguments(graph: fx.Graph) -> None:
    """Removes the placeholders of `*args` and `**kwargs`, which torch.fx takes for one input each."""
    for node in list(graph.nodes):
        if node.op == "placeholder" and str(node.target).startswith("*"):
            if node.users:
                raise TracingFailed("", RuntimeError(f"the forward uses {node.target}, which torch.fx cannot follow"))
            graph.erase_node(node)
