"""From an `nn.Module` to a graph of named layers and tensors, and from some of its layers back to a module."""

from bapipe.tracing.aliasing import changes_buffers
from bapipe.tracing.extract import extract
from bapipe.tracing.layers import granularity, trace
from bapipe.tracing.model import TracedLayer, TracedModel, idle_state, layer_states, state_names

__all__ = [
    "TracedLayer",
    "TracedModel",
    "changes_buffers",
    "extract",
    "granularity",
    "idle_state",
    "layer_states",
    "state_names",
    "trace",
]
