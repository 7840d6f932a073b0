"""Captures a module by recording what it calls; modules in which that fails become leaf modules."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from bapipe.module_state.assigned_attributes import may_change_tensors
from bapipe.module_state.cached_functions import caches_bypassed
from bapipe.module_state.code_state import state_of_forwards_restored
from bapipe.module_state.whose_code import is_of_torch, top_package
from bapipe.torch_private.modules import forward_hooks_of
from bapipe.tracing.aliasing import writers
from bapipe.tracing.captured import Captured
from bapipe.tracing.export_capture import silenced
from bapipe.tracing.fx_capture import TracingFailed
from bapipe.tracing.layer_choice import LayerChoice
from bapipe.tracing.merge_recordings import merge
from bapipe.tracing.reasons import Reason
from bapipe.tracing.record import record
from bapipe.tracing.recording import Recording, why_not_recorded
from bapipe.tracing.sizes import BATCH_SIZES, CHECK_BATCH_SIZE


def capture_by_recording(
    module: nn.Module,
    inputs: Sequence[Tensor],
    choice: LayerChoice,
    check_size: int = CHECK_BATCH_SIZE,
) -> Captured:
    """Returns the operators that a module calls for inputs of three batch sizes, of which `check_size` is the third.

    Raises:
        TracingFailed: the model's own forward, outside of its modules, cannot be recorded.
    """
    reasons: dict[str, Reason] = {}
    sizes = (*BATCH_SIZES, check_size)
    while True:
        try:
            with silenced(), caches_bypassed(module):
                recordings = _recordings(module, inputs, sizes, choice, reasons)
            return replace(merge(module, recordings, check_size), leaf_reasons=_outermost(reasons))
        except TracingFailed as error:
            if not error.path or error.path in reasons:
                raise TracingFailed(error.path, error.cause, reasons | error.reasons) from error
            reasons[error.path] = why_not_recorded(error.cause).behind("it cannot be traced: ")


def capture_with_calls(
    module: nn.Module, inputs: Sequence[Tensor], choice: LayerChoice, check_size: int
) -> Captured | None:
    """Returns what recording captures, if layers pass values to the code around them by other ways than returning them.

    They may write to their inputs, or hooks on them keep values, but not those of torch's own code. Recording calls
    layers. While torch.fx traces they are not called: what they write is not seen, and what hooks keep is missing, or
    of an earlier forward.
    """
    layers = [part for path, part in module.named_modules() if choice.is_layer(part, path)]
    hooks = (hook for part in layers for one in forward_hooks_of(part) for hook in one.values())
    have_hooks = any(top_package(hook) != "torch" for hook in hooks)
    if not have_hooks and not any(may_change_tensors(part) for part in layers if not is_of_torch(part)):
        return None
    try:
        captured = capture_by_recording(module, inputs, choice, check_size)
    except TracingFailed:
        return None
    calls = (node for node, _ in writers(captured.module) if node in captured.layer_of_call)
    write = any(not is_of_torch(module.get_submodule(str(node.target))) for node in calls)
    return captured if have_hooks or write else None


def _outermost(reasons: Mapping[str, Reason]) -> dict[str, Reason]:
    """Returns the reasons of leaf modules without those of modules inside others, which no layer is."""
    return {path: why for path, why in reasons.items() if not any(path.startswith(f"{outer}.") for outer in reasons)}


def _recordings(
    module: nn.Module,
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    choice: LayerChoice,
    reasons: dict[str, Reason],
) -> list[Recording]:
    """Returns recordings at some batch sizes with the same leaf modules; adds to `reasons` why modules became such."""
    recordings: list[Recording] = []
    while len(recordings) < len(sizes):
        with state_of_forwards_restored(module):  # a number that counts shall not look like a function of the size
            recording = record(module, inputs, sizes[len(recordings)], choice.with_leaves(reasons))
        if recording.leaf_reasons and recordings:
            recordings.clear()
        else:
            recordings.append(recording)
        reasons |= recording.leaf_reasons
    return recordings
