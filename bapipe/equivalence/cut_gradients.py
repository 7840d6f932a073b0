"""Which tensors that cross a cut need a gradient: those that did when the model was traced."""

from collections.abc import Sequence

from torch import Tensor

from bapipe.errors import InvalidModel


def check_gradients(names: Sequence[str], outputs: Sequence[Tensor], traced: Sequence[bool]) -> None:
    """Raises InvalidModel if an output that the next stage takes needs a gradient, and did not when it was traced.

    The next stage would send none back: of None, torch makes 1 for a tensor of one element, without an error.

    Args:
        names: of the outputs.
        traced: whether each needed a gradient when the model was traced.
    """
    for name, output, needed in zip(names, outputs, traced, strict=True):
        if isinstance(output, Tensor) and output.requires_grad and not needed:
            raise InvalidModel(
                f"'{name}' needs a gradient now, and did not when the model was traced, so the next stage sends none "
                "back: plan another cut, or make a module of the layers that give and use it, and that module one "
                "layer (`leaf_modules`)"
            )
