"""The content of tensors, and which have changed, found without waiting for a device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bapipe.runtime.tensor_samples import Comparison, SampledValues, sample_of, sampled_values
from bapipe.torch_private.tensors import address, version
from bapipe.tracing.python_state import same_tensor


def content(tensor: Tensor) -> bytes:
    """Returns the values of a tensor as they lie in memory, row after row."""
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


class TensorWrites:
    """Finds the tensors that are written to, at a small fixed cost for each and without waiting for a GPU.

    They are found by torch's counts of writes, by where their values lie, and by a few of the values: torch counts no
    writes to `tensor.data`, through `tensor.numpy()`, and of kernels that do not tell it (batch norm's to its running
    mean and variance). Of these, writes to a few elements only are not seen.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[Tensor, int, int]] = {}  # (tensor, count of writes, address)
        self._samples: dict[str, tuple[int, Tensor]] = {}  # (address, sample)
        self._values: list[SampledValues] = []
        self._unread: list[Comparison] = []

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Looks at tensors by name, before a time in which they may be written to."""
        self._before = {name: (tensor, version(tensor), address(tensor)) for name, tensor in tensors.items()}
        known, self._samples = self._samples, {}
        for name, (tensor, _, where) in self._before.items():
            if where:
                is_same = name in known and known[name][0] == where  # it keeps the memory: no other tensor is there
                self._samples[name] = known[name] if is_same else (where, sample_of(tensor))
        self._values = self._values_now()

    def finish(self) -> frozenset[str]:
        """Returns the names of those that have been written to since `begin`.

        If that is known by values on a GPU, it is told by a later call, after the GPU has compared them, or by `wait`.
        """
        counted = {
            name
            for name, (tensor, count, where) in self._before.items()
            if version(tensor) != count or address(tensor) != where
        }
        self._unread += map(Comparison, self._values, self._values_now())
        self._before, self._values = {}, []
        done = [comparison for comparison in self._unread if comparison.is_done()]
        self._unread = [comparison for comparison in self._unread if comparison not in done]
        return frozenset(counted).union(*(comparison.different() for comparison in done))

    def wait(self) -> frozenset[str]:
        """Returns the names that no call has told yet; waits for the device."""
        unread, self._unread = self._unread, []
        return frozenset[str]().union(*(comparison.different() for comparison in unread))

    def _values_now(self) -> list[SampledValues]:
        return sampled_values({name: sample for name, (_, sample) in self._samples.items()})


def replaced(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors, by name, in whose place there is now another one, which was assigned."""
    return {name: tensor for name, tensor in before.items() if now.get(name, tensor) is not tensor}


class TensorChanges:
    """Finds the tensors whose values a step changes.

    The first step is found by comparing values. For later ones `TensorWrites` tells, so that a GPU is not waited for;
    but what the first step has written to without changing it is compared in each.
    """

    def __init__(self) -> None:
        self._rewritten: frozenset[str] | None = None  # names; None in the first step
        self._tensors: Mapping[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._writes = TensorWrites()

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Remembers tensors by name, before a step."""
        compared = tensors if self._rewritten is None else self._rewritten & tensors.keys()
        self._before = {name: tensors[name].detach().clone() for name in compared}
        self._tensors = tensors
        self._writes.begin(tensors)

    def changed(self, now: Mapping[str, Tensor]) -> frozenset[str]:
        """Returns the names of those that the step has changed; `now` are the tensors after it."""
        written = self._writes.finish()
        unwritten = {name: tensor for name, tensor in self._tensors.items() if name not in written}
        earlier = replaced(unwritten, now) | self._before
        different = {name for name, value in earlier.items() if name in now and not same_tensor(value, now[name])}
        self._tensors, self._before = {}, {}
        if self._rewritten is None:
            self._rewritten = written - different
        return frozenset(different | (written - self._rewritten))
