"""Captures a module by recording what it calls; modules in which that fails become leaf modules."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from bapipe.tracing.captured import Captured, is_layer
from bapipe.tracing.export_capture import silenced
from bapipe.tracing.fx_capture import TracingFailed
from bapipe.tracing.merge_recordings import merge
from bapipe.tracing.record import record
from bapipe.tracing.sizes import BATCH_SIZES, CHECK_BATCH_SIZE


def capture_by_recording(module: nn.Module, inputs: Sequence[Tensor], leaf_modules: Sequence[str]) -> Captured:
    """Returns the operators that a module calls for inputs of three batch sizes.

    Raises:
        TracingFailed: the model's own forward, outside of its modules, cannot be recorded.
    """
    reasons: dict[str, str] = {}
    while True:
        leaves = frozenset((*leaf_modules, *reasons))
        try:
            return replace(_captured(module, inputs, leaves), leaf_reasons=reasons)
        except TracingFailed as error:
            if not error.path or error.path in leaves:
                raise
            reasons[error.path] = f"it cannot be traced: {str(error).partition(chr(10))[0]}"


def _captured(module: nn.Module, inputs: Sequence[Tensor], leaves: frozenset[str]) -> Captured:
    is_whole = lambda part, path: is_layer(part, path, leaves)  # noqa: E731
    with silenced():
        recordings = [record(module, inputs, batch, is_whole) for batch in (*BATCH_SIZES, CHECK_BATCH_SIZE)]
    return merge(module, recordings)
