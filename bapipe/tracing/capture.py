"""Captures a module as a graph of operators: by torch.fx, by recording its calls, or by torch.export."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bapipe.errors import InvalidModel, first_line
from bapipe.module_state.whose_code import top_package
from bapipe.torch_private.modules import hooks_in_words, hooks_of, is_compiled, is_exported, is_scripted
from bapipe.torch_private.tensors import distributions_unvalidated
from bapipe.tracing.captured import Captured, autocast_everywhere
from bapipe.tracing.code_position import failed_line
from bapipe.tracing.export_capture import capture_with_export
from bapipe.tracing.fx_capture import TracingFailed, capture_with_fx
from bapipe.tracing.kept_calls import CannotKeep
from bapipe.tracing.layer_choice import LayerChoice
from bapipe.tracing.reasons import REGISTER_INSIDE, Reason
from bapipe.tracing.recorded_capture import capture_by_recording, capture_with_calls
from bapipe.tracing.recording import ExamplesFail, why_not_recorded
from bapipe.tracing.sizes import CHECK_BATCH_SIZE

_COLLECTING = ("transformers.utils.output_capturing",)
"""Modules of hooks that do nothing but collect what a module returns, for code of the model that runs later."""


@distributions_unvalidated()
def capture(
    module: nn.Module,
    inputs: Sequence[Tensor] | None,
    choice: LayerChoice,
    called_leaves: bool = False,
    check_size: int = CHECK_BATCH_SIZE,
    wanted: frozenset[str] = frozenset(),
) -> Captured:
    """Returns the operators of a module.

    torch.fx is tried first, because it keeps the model's modules and with them their hooks, and is valid for all sizes.
    It fails if the model's code depends on its inputs. Then, with `inputs`, examples of any batch size, the calls of
    the model's code are recorded; modules in which that fails become leaf modules. If one of these would hold most of
    the model, torch.export is tried. The last resort is torch.fx with the modules in which it fails as leaf modules.
    torch's distributions in that code do not validate their arguments, neither here nor when the model trains.

    Args:
        called_leaves: whether leaf modules must be called as they are; torch.export sees through them.
        check_size: a batch size at which what is recorded must be right.
        wanted: calls of modules that are layers, if that is known: recording may find them where torch.fx does not.

    Raises:
        InvalidModel: all of this fails; the message says where.
    """
    check_has_layers(module)
    num_inputs = None if inputs is None else len(inputs)
    leaves = _Leaves(choice)
    leaves.add(_hooked_containers(module, choice))
    at_first = leaves.choice
    if inputs is not None:
        called = capture_with_calls(module, inputs, at_first, check_size)
        if called is not None and wanted.issubset(called.layer_of_call.values()):
            return replace(called, leaf_reasons=leaves.reasons | dict(called.leaf_reasons))
    try:
        captured = leaves.capture(module, num_inputs)
        if inputs is None or wanted.issubset(captured.layer_of_call.values()):
            return captured
        with contextlib.suppress(TracingFailed):
            other = capture_by_recording(module, inputs, at_first, check_size)
            captured = other if wanted.issubset(other.layer_of_call.values()) else captured
        return captured
    except TracingFailed as error:
        failed = error
    if inputs is None or isinstance(failed.cause, CannotKeep):
        return _capture_with_leaves(module, None, leaves, failed)
    recorded, not_recorded = None, None
    try:
        recorded = capture_by_recording(module, inputs, leaves.choice, check_size)
        recorded = replace(recorded, leaf_reasons=leaves.reasons | dict(recorded.leaf_reasons))
    except TracingFailed as error:
        not_recorded = error
    if recorded is not None and (leaves.reasons or not _is_coarse(module, recorded)):
        return recorded
    if not called_leaves:
        # Whatever torch.export raises, its texts do not help: how recording failed does.
        # It would write down every cast, whereas its operators run under autocast later.
        with contextlib.suppress(Exception), autocast_everywhere(None):
            return capture_with_export(module, inputs, leaves.choice)
    return recorded or _capture_with_leaves(module, num_inputs, leaves, failed, not_recorded)


def _is_coarse(module: nn.Module, captured: Captured) -> bool:
    """Returns whether one of the modules that capturing made leaf modules holds most of the model's parameters."""
    whole = sum(parameter.numel() for parameter in module.parameters())
    leaves = (module.get_submodule(path) for path in captured.leaf_reasons)
    return any(2 * sum(parameter.numel() for parameter in leaf.parameters()) > whole for leaf in leaves)


def _capture_with_leaves(
    module: nn.Module,
    num_inputs: int | None,
    leaves: "_Leaves",
    failed: TracingFailed,
    recorded: TracingFailed | None = None,
) -> Captured:
    """Returns what torch.fx captures if the modules in which it fails are leaf modules.

    Args:
        failed: how it failed without these.
        recorded: how recording failed, if it did.
    """
    while failed.path and failed.path not in leaves.choice.leaf_modules:  # so each turn adds one
        leaves.add({failed.path: _reason_of_leaf(failed, recorded)})
        try:
            return leaves.capture(module, num_inputs)
        except TracingFailed as error:
            failed = error
    advice = "put this code into a module of its own, which is then one layer"
    if recorded is not None and isinstance(recorded.cause, ExamplesFail):
        advice = "a model must take any number of samples like those of its example inputs"
    raise InvalidModel(
        f"{type(module).__name__} cannot be traced: {_reason(failed, recorded)}; {advice}"
    ) from failed.cause


def _reason_of_leaf(failed: TracingFailed, recorded: TracingFailed | None) -> Reason:
    """Returns why a module in which torch.fx fails is one layer.

    Recording follows code that torch.fx cannot: where it was tried, it is what recording met that has to be changed.
    """
    if recorded is None:
        return Reason(f"it cannot be traced: {first_line(failed.cause)}{failed_line(failed.cause) or ''}")
    around = why_not_recorded(recorded.cause).behind("the code of the model around it cannot be traced: ")
    return recorded.reasons.get(failed.path, around)


def _reason(failed: TracingFailed, recorded: TracingFailed | None) -> str:
    """Returns why a model's own code cannot be traced, and its line.

    Args:
        failed: how torch.fx failed.
        recorded: how recording failed, if that was tried: it runs the code as it is, so it knows better.
    """
    if recorded is not None:
        return why_not_recorded(recorded.cause).text
    cause, line = failed.cause, failed_line(failed.cause) or ""
    without_values = "; a forward is traced without values, so it cannot branch on tensors"
    return f"{first_line(cause)}{line}{'' if isinstance(cause, CannotKeep) else without_values}"


class _Leaves:
    """The choice of the caller, with the modules that must be one layer each, too, and reasons."""

    def __init__(self, choice: LayerChoice) -> None:
        self.choice = choice
        self.reasons: dict[str, Reason] = {}

    def add(self, reasons: Mapping[str, Reason]) -> None:
        self.reasons |= reasons
        self.choice = self.choice.with_leaves(reasons)

    def capture(self, module: nn.Module, num_inputs: int | None) -> Captured:
        """Captures with torch.fx; modules that a graph cannot keep as they are become leaf modules.

        Raises:
            TracingFailed: the model's code cannot run without values, or a graph cannot keep the model's own forward.
        """
        while True:
            try:
                captured = capture_with_fx(module, num_inputs, self.choice)
                return replace(captured, leaf_reasons=self.reasons)
            except CannotKeep as error:
                if "" in error.reasons or self.choice.leaf_modules.issuperset(error.reasons):
                    raise TracingFailed("", error) from error
                self.add(error.reasons)


def _hooked_containers(module: nn.Module, choice: LayerChoice) -> dict[str, Reason]:
    """Returns which modules that are no layers have hooks, which only a call of the module runs.

    Hooks that only collect results are left out: while a module is traced they run, and what is collected is followed.

    Raises:
        InvalidModel: the model itself has hooks.
    """
    hooked = {
        path: Reason(f"it has {hook}", REGISTER_INSIDE)
        for path, part in module.named_modules()
        if (hook := hooks_in_words(part)) is not None
        and not (path and all(map(_only_collects, hooks_of(part))))
        and not choice.is_layer(part, path)
    }
    if "" in hooked:
        raise InvalidModel(
            f"{type(module).__name__} has a hook on itself, which belongs to none of its layers: remove it, or "
            "register it on a module inside"
        )
    return hooked


def _only_collects(hook: object) -> bool:
    return getattr(hook, "__module__", None) in _COLLECTING


def check_has_layers(module: nn.Module) -> None:
    """Raises InvalidModel if a module is of a kind that cannot be cut, or has a tensor that no stage holds.

    The latter are parameters and buffers without a shape, and sparse ones.
    """
    has_no_layers = {
        "scripted by torch.jit": is_scripted(module),
        "compiled by torch.compile": is_compiled(module),
    }
    for how, is_so in has_no_layers.items():
        if is_so:
            raise InvalidModel(f"the module is {how}, so it has no layers to cut between: {_instead(module)}")
    for path, part in module.named_modules():
        if "#" in path:
            raise InvalidModel(
                f"module '{path}' has a '#' in its name, which marks the later calls of a module: rename it"
            )
        if isinstance(part, nn.SyncBatchNorm) and part.training:
            raise InvalidModel(
                f"module '{path}' is a SyncBatchNorm, which waits for other processes to normalize their samples too: "
                "each micro-batch passes through a layer in one process alone; use a batch norm, whose statistics are "
                "those of a micro-batch (leave out `convert_sync_batchnorm`)"
            )
        if is_exported(part):
            name = f"module '{path}'" if path else "the module"
            raise InvalidModel(
                f"{name} was made by torch.export, so it has no layers to cut between, nor a training mode: give the "
                "module that it was made from"
            )
        if is_scripted(part) and (*part.parameters(), *part.buffers()):
            raise InvalidModel(
                f"module '{path}' is scripted by torch.jit, so its parameters and buffers cannot be given to one "
                f"stage: {_instead(part)}"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise InvalidModel(f"'{name}' has no shape yet: call the module once, on any samples, where it is made")
        if tensor.layout is not torch.strided:
            raise InvalidModel(
                f"'{name}' is a sparse tensor ({tensor.layout}), and stages hold dense ones only: register its "
                "to_dense() instead"
            )


def _instead(module: nn.Module) -> str:
    """Says what to give in place of a module that is compiled."""
    kind = type(module)
    if not is_scripted(module) or top_package(kind) == "torch":
        return "give the module that it was made from"
    return (
        f"its class {kind.__name__} is a torch.jit.ScriptModule; set PYTORCH_JIT=0 in the environment, also where it "
        "trains, or make it a class of torch.nn.Module"
    )
