"""From an `nn.Module` to a graph of named layers and tensors, and from some of its layers back to a module."""

from bapipe.tracing.aliasing import changes_buffers
from bapipe.tracing.extract import extract
from bapipe.tracing.layers import granularity, trace
from bapipe.tracing.model import TracedLayer, TracedModel, layer_states, state_names, unused_state

__all__ = [
    "TracedLayer",
    "TracedModel",
    "changes_buffers",
    "extract",
    "granularity",
    "layer_states",
    "state_names",
    "trace",
    "unused_state",
]
