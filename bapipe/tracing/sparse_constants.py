"""Refuses a model that uses sparse tensors of its own between its layers: stages hold dense ones only."""

import torch

from bapipe.errors import InvalidModel
from bapipe.tracing.model import TracedModel, layer_states


def check_constants_dense(model: TracedModel) -> None:
    """Raises InvalidModel if a constant of a layer is sparse; parameters and buffers are checked before tracing."""
    for layer, state in layer_states(model).items():
        for tensor in state.values():
            if tensor.layout is not torch.strided:
                raise InvalidModel(
                    f"the operators of layer '{layer}' use a sparse tensor ({tensor.layout}) of shape "
                    f"{tuple(tensor.shape)} as a constant, and stages hold dense ones only: use its to_dense(), or "
                    "make it in the forward of a module that is one layer (`leaf_modules`)"
                )
