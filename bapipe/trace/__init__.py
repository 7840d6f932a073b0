"""From an `nn.Module` to a graph of named layers and tensors, and from some of its layers back to a module."""

from bapipe.trace.aliasing import changes_buffers
from bapipe.trace.extract import extract
from bapipe.trace.layers import granularity, trace
from bapipe.trace.model import TracedLayer, TracedModel, idle_state, layer_states, state_names

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
