"""Every private name of torch that bapipe uses, behind names of its own.

torch promises nothing about names with a leading underscore (and nothing about the pipelining runtime's insides), so
when a new release breaks bapipe, this is the file to look at. A test holds that no other file uses such names.
Works with torch 2.11 to 2.13; what it takes before 2.13 is in `older_torch_private`.

`torch.distributed.pipelining` is imported inside the functions that need it: that takes as long as torch itself, and
tracing, which only needs nested structures, should not wait for it.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped
from torch._C._profiler import _EventType as EventType
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as without_fake_tensors
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributions import Distribution
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = [  # torch's names
    "DispatchMode",
    "DropoutBase",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "OpOverload",
    "TreeSpec",
    "is_functorch_wrapped",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "without_fake_tensors",
]


# Operators, tensors and modules


def argument_schemas(operator: OpOverload) -> Sequence[Any]:
    """Returns the arguments in an operator's schema, with what they alias and whether they are written."""
    arguments: Sequence[Any] = operator._schema.arguments
    return arguments


def aten_overloads(name: str) -> list[OpOverload]:
    """Returns the operators of torch behind a function or method of this name; none if there is no such one."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]  # type: ignore[no-untyped-call]


def return_schemas(operator: OpOverload) -> Sequence[Any]:
    """Returns the results in an operator's schema, with what they alias."""
    returns: Sequence[Any] = operator._schema.returns
    return returns


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of another one, for autograd."""
    return tensor._is_view()


def storage_key(tensor: Tensor) -> int:
    """Returns a number that tensors have in common which share memory, also on the meta device, while one is alive."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # of layouts without a storage, such as sparse ones
        return id(tensor)
    return key


@contextmanager
def distributions_unvalidated() -> Iterator[None]:
    """In this context torch's distributions do not validate their arguments, which takes values, unless told to."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def needs_values(error: Exception) -> bool:
    """Whether an operator raised an error because its arguments are fake tensors, which have no values."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def version(tensor: Tensor) -> int:
    """Returns how often a tensor's memory was written to; 0 if torch does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def without_tensor_classes() -> AbstractContextManager[object]:
    """In this context subclasses of tensors behave as tensors do."""
    return torch._C.DisableTorchFunctionSubclass()


def is_in_transform() -> bool:
    """Returns whether this runs in a function that `torch.func` transforms, such as by `vmap`."""
    return torch._C._functorch.maybe_current_level() is not None


def autograd_mode() -> tuple[bool, object]:
    """Returns whether gradients are computed, and what tensors that autograd saves are replaced by.

    Functions that a backward runs again are in another mode than what is around them.
    """
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(False)


def version_kept(tensor: Tensor) -> AbstractContextManager[object]:
    """In this context torch does not count writes to a tensor."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile` returns."""
    return isinstance(getattr(module, "_orig_mod", None), nn.Module)


def is_exported(module: nn.Module) -> bool:
    """Whether a module is what `torch.export` makes of a model: operators in one mode, which has no layers."""
    from torch.export._unlift import _StatefulGraphModule

    return isinstance(module, _StatefulGraphModule)


def hooks_of(module: nn.Module) -> list[Callable[..., object]]:
    """Returns the hooks that a call of a module runs, forward or backward."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for name in names for hook in getattr(module, name).values()]


def hooks_in_words(module: nn.Module) -> str | None:
    """Says whose code a module's first hook is, as other libraries register some; None if it has none."""
    hooks = hooks_of(module)
    if not hooks:
        return None
    code = hooks[0].func if isinstance(hooks[0], partial) else hooks[0]
    return f"a hook of '{getattr(code, '__module__', None) or type(code).__module__}'"


def reset_method(module: nn.Module) -> Callable[[], object] | None:
    """Returns the method that draws a module's initial parameters; some of torch's modules have it under `_`."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


@contextmanager
def without_weak_references(root: nn.Module) -> Iterator[None]:
    """Takes the weak references to their parameters from recurrent layers, and makes them anew afterwards.

    `torch.utils.swap_tensors` refuses a tensor that has weak references.
    """
    recurrent = [module for module in root.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._init_flat_weights()


def parameter_hooks(parameter: nn.Parameter) -> list[Callable[..., object]]:
    """The hooks on a parameter's gradient, before and after it is accumulated."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [*(parameter._backward_hooks or {}).values(), *(after or {}).values()]


def give_storage(tensor: Tensor, value: Tensor) -> None:
    """Gives a tensor the storage of another one, which is lost; its class, attributes and hooks stay.

    All references to the tensor, such as tied weights, see the new storage.

    Raises:
        RuntimeError: something outside of Python, such as an autograd graph or a scripted module, holds the tensor.
    """
    value.__class__ = type(tensor)
    vars(value).update(vars(tensor))
    torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
    # Autograd has noted the hooks beside the storage, which are now the other tensor's: assigning notes them anew.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks, None) is not None:
            setattr(tensor, hooks, getattr(tensor, hooks))


# Process groups


def default_group_timeout(device: torch.device) -> Any:
    """Returns how long an operation of the default group may take on a device; `new_group` does not take it over."""
    group = dist.distributed_c10d._get_default_group()
    # Neither a group that is written in Python says it, nor torch's for tests.
    options = _backend(group, device).options if type(group) is dist.ProcessGroup else None
    return dist.distributed_c10d.default_pg_timeout if options is None else options._timeout


def forget_unfinished_groups() -> None:
    """Numbers process groups from 0 again, as ranks must agree: torch counts a default group that failed to connect."""
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Sets how long collectives of a group of gloo may take from now on."""
    _backend(group, torch.device("cpu"))._set_default_timeout(timeout)


def occupy_gpu(device: torch.device, cycles: int) -> None:
    """Makes a GPU do nothing for a number of its cycles, on its current stream; returns at once."""
    wait: Callable[[int], None] = torch.cuda._sleep  # which torch leaves without types
    with torch.cuda.device(device):
        wait(cycles)


def backend_name(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the name of a group's backend for the tensors of a device, such as gloo or nccl; None: default group."""
    group = group or dist.distributed_c10d._get_default_group()
    if type(group) is not dist.ProcessGroup:  # one that is written in Python is its own backend
        return str(dist.get_backend(group))
    name: str = _backend(group, device).name()
    return name


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns what runs a group's operations on a device: TORCH_DISTRIBUTED_DEBUG=DETAIL puts checks around it."""
    backend: Any = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


# A backward in two parts, I and W


def stage_backward_input(
    outputs: list[Tensor], grads: list[Tensor], inputs: list[Tensor], weights: Iterable[nn.Parameter]
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """Runs I; returns the gradients of the inputs, and the groups of weights for `stage_backward_weight`."""
    if is_before_2_13():
        from bapipe import older_torch_private

        return older_torch_private.stage_backward_input(outputs, grads, inputs, weights)
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input(outputs, grads, inputs, iter(weights))


def stage_backward_weight(weights: Iterable[nn.Parameter], groups: Iterable[dict[str, Any]]) -> None:
    """Runs W of the groups that I has left, which it empties, and adds to the gradients of the weights.

    torch's own is wrong before torch 2.13: it counts a gradient twice if a node at which W begins leads to another.
    """
    weight_of = {get_gradient_edge(weight).node: weight for weight in weights if weight.requires_grad}
    for group in groups:
        nodes, kept = group.pop("intermediates"), group.pop("grads")
        starts = [
            (GradientEdge(node, number), grad)
            for node, by_output in zip(nodes, kept, strict=True)
            for number, grad in enumerate(by_output)
            if grad is not None
        ]
        if not starts:
            continue
        params = list(group["params"])
        with ExitStack() as hooks:
            # A node that another one leads to gets what I has kept, and not a second time what comes from the other.
            for node, by_output in zip(nodes, kept, strict=True) if len(nodes) > 1 else ():
                hooks.callback(node.register_prehook(_replace(by_output)).remove)
            found = torch.autograd.grad(
                [edge for edge, _ in starts],
                [*(GradientEdge(param, 0) for param in params), *_inputs_asked_for(nodes)],
                [grad for _, grad in starts],
                allow_unused=True,
            )
        for param, grad in zip(params, found, strict=False):
            weight = weight_of[param]
            if grad is not None:
                weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


def _replace(by_output: tuple[Tensor | None, ...]) -> Callable[[Any], Any]:
    return lambda _: by_output


def _inputs_asked_for(nodes: Iterable[Node]) -> list[GradientEdge]:
    """Returns the inputs of nodes whose gradients must be computed for those of the weights.

    On CPUs, torch's group norm in channels-last memory dies of a segmentation fault if asked for the latter alone.
    """
    norms = [node for node in nodes if node.name() == "NativeGroupNormBackward0"]
    inputs = [
        node.next_functions[0]
        for node in norms
        if (saved := node._saved_input).device.type == "cpu"  # type: ignore[attr-defined]
        and suggest_memory_format(saved) != torch.contiguous_format
    ]
    return [GradientEdge(node, number) for node, number in inputs if node is not None]


def use_stage_backward_weight(stage: "PipelineStage") -> None:
    """Lets a stage of torch's runtime run W by `stage_backward_weight`."""
    original = stage.backward_maybe_with_nosync

    def backward(backward_type: str, arguments: dict[str, Any], last_backward: bool = False) -> Any:
        if backward_type != "weight":
            return original(backward_type, arguments, last_backward)
        stage_backward_weight(stage.submod.parameters(), arguments["param_groups"])
        return (), None

    stage.backward_maybe_with_nosync = backward  # type: ignore[method-assign, assignment]


def construct_reverse_graph(roots: list[Node]) -> Any:
    """Returns which nodes of the autograd graph lead to each node."""
    from torch.distributed.pipelining import _backward

    return _backward.construct_reverse_graph(roots)


def get_param_groups(inputs: list[Node], weights: list[Node], reverse_graph: Any) -> list[dict[str, Any]]:
    """Returns the groups of weights that have nodes in common where their gradients leave the path to the inputs."""
    from torch.distributed.pipelining import _backward

    return _backward.get_param_groups(inputs, weights, reverse_graph)


def num_outputs(node: Node) -> int:
    """Returns how many results the operator of a node of the autograd graph has, each of which may have a gradient."""
    return len(node._input_metadata)


def can_begin_at(node: Node) -> bool:
    """Whether W can begin at a node of the autograd graph: before torch 2.13 not at one of an `autograd.Function`."""
    return not is_before_2_13() or not isinstance(node, torch.autograd.function.BackwardCFunction)


def memory_events(profiler: torch.profiler.profile) -> list[tuple[str, int]]:
    """Returns the events of a profile of the CPU in order, each with the bytes it allocates or, if negative, frees.

    Storages allocated before the profile do not count as freed. torch keeps the addresses of all storages that earlier
    profiles saw allocated and none saw freed, and reports what has come to lie there since as freed, with the old size.
    """
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    unvisited = list(profiler.profiler.kineto_results.experimental_event_tree())
    events: list[Any] = []
    while unvisited:
        events.append(unvisited.pop())
        unvisited += events[-1].children
    allocated: set[int] = set()
    changes = []
    for event in sorted(events, key=lambda event: event.start_time_ns):
        num_bytes = 0
        if event.typed[0] == EventType.Allocation:
            address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
            if size > 0:
                allocated.add(address)
                num_bytes = size
            elif address in allocated:
                allocated.remove(address)
                num_bytes = size
        changes.append((event.name, num_bytes))
    return changes


PIPELINE_LOG = "torch.distributed.pipelining.schedules"
"""Where torch writes whole schedules if an action fails."""


@contextmanager
def without_log(name: str) -> Iterator[None]:
    """Keeps a log from being written to stderr."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keeps torch from writing tracebacks of errors that are dealt with, and that a recurrent layer must be a bug."""
    with without_log("torch._subclasses.fake_tensor"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


# torch's pipeline runtime; the executor explains what each change is for


@cache
def is_before_2_13() -> bool:
    """Whether torch's stages lack what `older_torch_private` adds."""
    from torch.distributed.pipelining.stage import _RecvInfo

    return "tensor_meta" not in inspect.signature(_RecvInfo).parameters


def stage_class() -> "type[PipelineStage]":
    """Returns the class of a stage for torch's runtime."""
    if is_before_2_13():
        from bapipe.older_torch_private import OlderStage

        return OlderStage
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage


def pipeline_runtime(stages: "Sequence[PipelineStage]", num_microbatches: int, loss: Callable[..., Tensor]) -> Any:
    """Returns torch's runtime, which executes lowered actions one after another; it does not scale gradients."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    return _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        list(stages), n_microbatches=num_microbatches, loss_fn=loss, scale_grads=False
    )


def set_lowered_order(runtime: Any, order: Mapping[int, Sequence[str]]) -> None:
    """Sets the lowered actions of each process."""
    from torch.distributed.pipelining.schedules import _Action

    runtime.pipeline_order_with_comms = {
        process: [_Action.from_str(action) for action in actions] for process, actions in order.items()
    }


def replace_losses(runtime: Any, loss_of: Callable[[int], Tensor]) -> None:
    """Makes the runtime take the loss of a micro-batch from `loss_of`.

    torch finds losses by their order of arrival and wants all micro-batches; a replica has some of them only.
    """
    runtime._maybe_get_loss = lambda stage, microbatch: loss_of(microbatch) if stage.is_last else None
    runtime._update_losses = lambda stages, losses: runtime._internal_losses.clear()


def skip_warmup(runtime: Any) -> None:
    """Removes the messages that stages exchange with their neighbours before the first step.

    They would connect processes in a group that carries nothing else, and greet the wrong replica of a stage, or, if
    neighbours are on one process, this one.
    """
    from torch.distributed.pipelining import _utils

    def skip(stages: "Sequence[PipelineStage]", *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC  # what the warm-up would find: shapes are known

    runtime._warmup_p2p = skip  # since torch 2.13
    for stage in runtime._stages:
        stage._get_init_p2p_neighbors_ops = list  # before


def keep_used_buffers(runtime: Any, receives: Callable[[int, int, int], bool]) -> None:
    """Lets a runtime keep the receive buffers only that it uses.

    `receives(stage, sender, microbatch)` says whether this process receives a micro-batch of a stage from another one,
    which runs the stage `sender`. torch allocates the buffers of all micro-batches, also of those that other replicas
    run, and for tensors that do not leave this process.
    """
    allocate = runtime._initialize_stages

    def initialize(*args: Any, **kwargs: Any) -> None:
        allocate(*args, **kwargs)
        for stage in runtime._stages:
            number = stage.stage_index
            for sender, received in ((number - 1, stage.args_recv_info), (number + 1, stage.grad_recv_info)):
                for microbatch in received:
                    if not receives(number, sender, microbatch):
                        drop_received(received[microbatch])

    runtime._initialize_stages = initialize


def drop_received(infos: Any) -> None:
    """Drops the tensors of a micro-batch that a stage received."""
    for info in infos:
        info.buffer = None


def drop_gradients_of_received(infos: Any) -> None:
    """Drops the gradients of the tensors of a micro-batch that a stage received, which torch keeps after I."""
    for info in infos:
        buffer = getattr(info, "buffer", None)  # none of the model's inputs
        if buffer is not None:
            buffer.grad = None
