"""Captures a module as a graph of operators: by torch.fx, else by torch.export, else with some modules as leaves."""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.torch_private import is_compiled
from bapipe.tracing.captured import Captured
from bapipe.tracing.export_capture import capture_with_export
from bapipe.tracing.fx_capture import TracingFailed, capture_with_fx
from bapipe.tracing.recorded_capture import capture_by_recording


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
        return capture_with_fx(module, num_inputs, frozenset(leaf_modules))
    except TracingFailed as error:
        first = error
    export_error = None
    if inputs is not None:
        try:
            return capture_by_recording(module, inputs, leaf_modules)
        except TracingFailed as error:
            export_error = _first_line(error.cause)
        try:
            return capture_with_export(module, inputs, frozenset(leaf_modules))
        except Exception as error:  # whatever torch.export or the model's own code raises
            export_error = _first_line(error)
    reasons: dict[str, str] = {}
    failed = first
    while failed.path:
        reasons[failed.path] = f"it cannot be traced: {_first_line(failed.cause)}{_code_position(failed.cause)}"
        try:
            captured = capture_with_fx(module, num_inputs, frozenset((*leaf_modules, *reasons)))
            return replace(captured, leaf_reasons=reasons)
        except TracingFailed as error:
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
