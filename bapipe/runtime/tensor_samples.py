"""Samples of the values of many tensors, compared with those at a later time without waiting for a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bapipe.runtime.copy_streams import start_copy
from bapipe.torch_private.tensors import without_tensor_classes

_NUM_VALUES = 16
"""Values that are sampled from a tensor. Almost any write to all of a tensor changes one of them."""


def sample_of(tensor: Tensor) -> Tensor:
    """Returns a view of up to 16 values of a dense tensor with values, evenly along its diagonal. [values]"""
    num = min(_NUM_VALUES, max(tensor.shape, default=1))
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    stride = sum((size - 1) // max(num - 1, 1) * stride for size, stride in sizes)
    with without_tensor_classes():
        return tensor.detach().as_strided((num,), (stride,))


@dataclass(frozen=True, slots=True)
class SampledValues:
    """Copies of the values of samples of one dtype, on one device.

    Attributes:
        num_bytes: the bytes of each sample, by name.
        values: the samples' bytes, concatenated; as numbers, NaN would differ from itself. [sum of num_bytes]
    """

    num_bytes: Mapping[str, int]
    values: Tensor


def sampled_values(samples: Mapping[str, Tensor]) -> list[SampledValues]:
    """Returns the current values of samples, in an order that depends only on their names, types and devices."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, sample in samples.items():
        groups.setdefault((sample.device, sample.dtype), {})[name] = sample
    return [
        SampledValues({name: sample.nbytes for name, sample in group.items()}, _bytes(torch.cat(list(group.values()))))
        for group in groups.values()
    ]


def _bytes(values: Tensor) -> Tensor:
    return values.resolve_conj().view(torch.uint8)


class Comparison:
    """A comparison of values of the same samples, which runs on their device after the work queued there."""

    def __init__(self, before: SampledValues, after: SampledValues) -> None:
        self._num_bytes = before.num_bytes
        differ = before.values != after.values
        self._differ, self._done = differ, None
        if differ.is_cuda:
            self._differ = torch.empty_like(differ, device="cpu", pin_memory=True)
            start_copy(self._differ, differ)
            self._done = torch.cuda.current_stream(differ.device).record_event()

    def is_done(self) -> bool:
        """Returns whether `different` would return without waiting."""
        return self._done is None or self._done.query()

    def different(self) -> list[str]:
        """Returns the names of the samples with other values; waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        if not self._differ.any():
            return []
        of_each = torch.split(self._differ, list(self._num_bytes.values()))
        return [name for name, differ in zip(self._num_bytes, of_each, strict=True) if differ.any()]
