"""Checks the tensors that a rank is given for a mini-batch against those that its stages expect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.formats.settings import Settings
from bapipe.torch_device import dtype_name
from bapipe.torch_settings import in_memory_format


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What a mini-batch must be like.

    Attributes:
        names: of the model's inputs, in order.
        needed: those of them that this rank loads.
        examples: one of each of the model's inputs, of any batch size.
        minibatch_size: the plan's.
        settings: the plan's, of which the memory format is applied.
    """

    names: tuple[str, ...]
    needed: tuple[str, ...]
    examples: Mapping[str, Tensor]
    minibatch_size: int
    device: torch.device
    settings: Settings

    def load(self, inputs: Sequence[Tensor | None], num_samples: int) -> dict[str, Tensor]:
        """Returns the needed inputs on the device.

        Raises:
            BapipeError: one is missing, or not of `num_samples` samples and its example's shape and type.
        """
        if len(inputs) > len(self.names):
            raise BapipeError(
                f"{len(inputs)} inputs for a model that takes {len(self.names)}: want {', '.join(self.names)}"
            )
        given = dict(zip(self.names, inputs, strict=False))
        return {name: self.checked(name, given.get(name), self.examples[name], num_samples) for name in self.needed}

    def checked(self, name: str, tensor: Tensor | None, example: Tensor | None, num_samples: int) -> Tensor:
        """Returns a tensor on the device, when it is there and like the example."""
        if tensor is None:
            raise BapipeError(f"this rank runs a stage that needs '{name}', which is missing")
        if not isinstance(tensor, Tensor):
            raise BapipeError(f"'{name}' is of type {type(tensor).__name__}: want a tensor")
        size = tensor.shape[0] if tensor.dim() else 0
        if size != num_samples:
            if num_samples != self.minibatch_size:
                raise BapipeError(f"'{name}' has {size} samples; num_samples is {num_samples}")
            raise BapipeError(
                f"'{name}' has {size} samples; the plan's mini-batch is {self.minibatch_size}: drop or pad a last, "
                "smaller batch (`evaluate` takes it as it is, if `num_samples` says how many there are)"
            )
        if example is not None and (tensor.shape[1:], tensor.dtype) != (example.shape[1:], example.dtype):
            raise BapipeError(
                f"'{name}' has samples of {_describe(tensor)}; the example inputs have {_describe(example)}"
            )
        return in_memory_format(tensor.to(self.device, non_blocking=True), self.settings)


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape[1:])} and type {dtype_name(tensor.dtype)}"
