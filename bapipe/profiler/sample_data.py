"""The samples that a model is measured on: made up like those of a training, if the model takes them.

Equal samples take other times on a GPU: an embedding adds up the gradients of equal rows one after another, and equal
numbers take less power, so that its clock is higher.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.equivalence.outcome import Loss
from bapipe.module_state.python_random import all_generators_restored
from bapipe.profiler.prepare import batch_on_device
from bapipe.torch_device import CPU
from bapipe.zoo.data.dataset import PipelineDataset

REPEATED, MADE_UP = "the example, repeated", "made up"
"""What profiles say of their samples, as `environment.data`."""

_NUM_TRIED = 2


class Samples:
    """Batches of a data set, or of the example inputs and target, repeated."""

    def __init__(self, examples: Sequence[Tensor], data: PipelineDataset[Any] | None) -> None:
        self._examples, self._data = examples, data

    @property
    def name(self) -> str:
        return REPEATED if self._data is None else MADE_UP

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Returns `size` samples on a device: the inputs in order, and the target.

        Raises:
            BapipeError: there is not enough memory for them.
        """
        if self._data is None:
            return batch_on_device(self._examples, size, device)
        return batch_on_device(self._stacked(size), size, device)

    def _stacked(self, size: int) -> tuple[Tensor, ...]:
        data = self._data
        assert data is not None
        return tuple(
            torch.stack([torch.as_tensor(data.part(index % len(data), place)) for index in range(size)])
            for place in range(len(self._examples))
        )


def samples_for(
    module: nn.Module,
    examples: Sequence[Tensor],
    data: PipelineDataset[Any] | None,
    loss: Loss,
    device: torch.device,
) -> Samples:
    """Returns samples of the data if they are like the examples and a module on the device takes them.

    Else the examples are repeated: a model may want words of its own, or numbers in a range.
    """
    repeated = Samples(examples, None)
    if data is None:
        return repeated
    samples = Samples(examples, data)
    try:
        wanted = repeated.batch(_NUM_TRIED, CPU)
        if [_form(tensor) for tensor in samples.batch(_NUM_TRIED, CPU)] != [_form(tensor) for tensor in wanted]:
            return repeated
        *inputs, target = samples.batch(_NUM_TRIED, device)
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with torch.no_grad(), all_generators_restored():
            loss(torch.func.functional_call(module, buffers, tuple(inputs)), target)
    except Exception:  # whatever the data, the model or its loss raises
        return repeated
    return samples


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
