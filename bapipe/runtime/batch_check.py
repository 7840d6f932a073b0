"""Checks the tensors that a rank is given for a mini-batch against those that its stages expect."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.formats.settings import Settings
from bapipe.job.groups import gathered
from bapipe.runtime.tensor_changes import content
from bapipe.torch_device import dtype_name
from bapipe.torch_settings import in_memory_format

GivenInput = Tensor | Mapping[str, Tensor | None] | None


def by_name(inputs: Sequence[GivenInput], names: Sequence[str]) -> dict[str, Tensor | None]:
    """Returns inputs by name: `inputs` are in the order of `names`, or one mapping by name.

    Raises:
        BapipeError: there are more inputs than names, or the mapping has an unknown name.
    """
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        unknown = [name for name in inputs[0] if name not in names]
        if unknown:
            raise BapipeError(
                f"'{unknown[0]}' is not a tensor input of the model: want {', '.join(names)}; constants are set when "
                "the Pipeline is made"
            )
        return dict(inputs[0])
    if len(inputs) > len(names):
        raise BapipeError(
            f"{len(inputs)} inputs for a model that takes {len(names)}: want {', '.join(names)}; constants are set "
            "when the Pipeline is made"
        )
    return dict(zip(names, inputs, strict=False))  # type: ignore[arg-type]  # what is no tensor is refused as such


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """The names, sizes and types that a mini-batch's tensors must have on this rank.

    Attributes:
        needed: the names of the inputs that this rank loads.
        examples: by name, an example of each of the model's inputs, of any batch size.
        minibatch_size: number of samples in the plan's mini-batch.
        settings: the plan's; inputs get their memory format.
    """

    needed: tuple[str, ...]
    examples: Mapping[str, Tensor]
    minibatch_size: int
    device: torch.device
    settings: Settings

    def load(self, given: Mapping[str, Tensor | None], num_samples: int) -> dict[str, Tensor]:
        """Returns the needed inputs by name, moved to the device; `given` are the inputs by name.

        Raises:
            BapipeError: a needed input is missing, or has not `num_samples` samples of its example's shape and type.
        """
        return {name: self.checked(name, given.get(name), self.examples[name], num_samples) for name in self.needed}

    def checked(self, name: str, tensor: Tensor | None, example: Tensor | None, num_samples: int) -> Tensor:
        """Returns a tensor, moved to the device; raises as `load`. Without `example` only its samples are counted."""
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
        given: the tensors that this process was given, by name.

    Raises:
        BapipeError: two processes were given different samples of the same name.
    """
    ends = {(name, end): tensor[end:][:1].detach().cpu() for name, tensor in given.items() for end in (0, -1)}
    # A sample of zeros is not compared: a process that does not need the samples may pass zeros for them.
    own = {place: hashlib.sha256(content(row)).hexdigest() for place, row in ends.items() if row.any()}
    first: dict[tuple[str, int], tuple[int, str]] = {}
    for process, others in enumerate(gathered(own, group)):
        for (name, end), digest in others.items():
            earlier, expected = first.setdefault((name, end), (process, digest))
            if digest != expected:
                raise BapipeError(
                    f"process {process} was given other samples of '{name}' than process {earlier}: all processes take "
                    "the same mini-batch, so seed shuffling and augmentation alike, and use no DistributedSampler; "
                    "a process may pass None for what it does not need (`needs`, `needs_target`)"
                )


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape[1:])} and type {dtype_name(tensor.dtype)}"
