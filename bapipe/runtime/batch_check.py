"""Checks the tensors that a rank is given for a mini-batch against those that its stages expect."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.formats.settings import Settings
from bapipe.runtime.tensor_changes import content
from bapipe.torch_device import dtype_name
from bapipe.torch_settings import in_memory_format

GivenInput = Tensor | Mapping[str, Tensor | None] | None


def by_name(inputs: Sequence[GivenInput], names: Sequence[str]) -> dict[str, Tensor | None]:
    """Returns inputs, which are given in the order of the model's names or as one mapping, by name.

    Raises:
        BapipeError: there are more, or others.
    """
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        unknown = [name for name in inputs[0] if name not in names]
        if unknown:
            raise BapipeError(
                f"'{unknown[0]}' is no input of the model that is a tensor: want {', '.join(names)}; constants are "
                "those that the Pipeline was made with"
            )
        return dict(inputs[0])
    if len(inputs) > len(names):
        raise BapipeError(
            f"{len(inputs)} inputs for a model that takes {len(names)}: want {', '.join(names)}; constants are those "
            "that the Pipeline was made with"
        )
    return dict(zip(names, inputs, strict=False))  # type: ignore[arg-type]  # what is no tensor is refused as such


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What a mini-batch must be like.

    Attributes:
        needed: the names of the inputs that this rank loads.
        examples: one of each of the model's inputs, of any batch size.
        minibatch_size: the plan's.
        settings: the plan's, of which the memory format is applied.
    """

    needed: tuple[str, ...]
    examples: Mapping[str, Tensor]
    minibatch_size: int
    device: torch.device
    settings: Settings

    def load(self, given: Mapping[str, Tensor | None], num_samples: int) -> dict[str, Tensor]:
        """Returns the needed inputs on the device, of those given by name.

        Raises:
            BapipeError: one is missing, or not of `num_samples` samples and its example's shape and type.
        """
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


def check_same_batch(given: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Compares the first and last samples of a mini-batch over the processes of a group, which all call it together.

    Args:
        given: by name, what this process was given.

    Raises:
        BapipeError: two processes were given other samples of the same name.
    """
    digests: list[dict[tuple[str, int], str]] = [{}] * dist.get_world_size(group)
    ends = {(name, end): tensor[end:][:1].detach().cpu() for name, tensor in given.items() for end in (0, -1)}
    # Zeros may stand for no sample.
    own = {place: hashlib.sha256(content(row)).hexdigest() for place, row in ends.items() if row.any()}
    dist.all_gather_object(digests, own, group=group)
    first: dict[tuple[str, int], tuple[int, str]] = {}
    for process, others in enumerate(digests):
        for (name, end), digest in others.items():
            earlier, expected = first.setdefault((name, end), (process, digest))
            if digest != expected:
                raise BapipeError(
                    f"process {process} was given other samples of '{name}' than process {earlier}: all processes take "
                    "the same mini-batch, so seed shuffling and augmentation alike, and use no DistributedSampler; "
                    "None may stand for what a process does not need (`needs`, `needs_target`)"
                )


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape[1:])} and type {dtype_name(tensor.dtype)}"
