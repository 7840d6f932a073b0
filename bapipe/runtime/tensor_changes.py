"""The content of tensors, and which have been written to or changed, found without waiting for a GPU."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bapipe.module_state.python_state import same_tensor
from bapipe.runtime.tensor_samples import Comparison, SampledValues, sample_of, sampled_values
from bapipe.torch_private.tensors import address, version


def content(tensor: Tensor) -> bytes:
    """Returns the values of a tensor as they lie in memory, row after row."""
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


class TensorWrites:
    """Finds the tensors that are written to, at a small fixed cost for each and without waiting for a GPU.

    They are found by torch's counts of writes, by the addresses of their values, and by samples of the values: torch
    does not count writes to `tensor.data`, through `tensor.numpy()`, and by some kernels (batch norm's to its running
    mean and variance). Such writes are missed if they change only a few elements.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[Tensor, int, int]] = {}  # (tensor, count of writes, address)
        self._samples: dict[str, tuple[int, Tensor]] = {}  # (address, sample)
        self._values: list[SampledValues] = []
        self._unread: list[Comparison] = []

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Remembers the state of tensors, which are given by name, before they may be written to."""
        self._before = {name: (tensor, version(tensor), address(tensor)) for name, tensor in tensors.items()}
        known, self._samples = self._samples, {}
        for name, (tensor, _, where) in self._before.items():
            if where:
                is_same = name in known and known[name][0] == where  # the sample holds the memory: no other is there
                self._samples[name] = known[name] if is_same else (where, sample_of(tensor))
        self._values = self._values_now()

    def finish(self) -> frozenset[str]:
        """Returns the names of tensors that have been written to since `begin`.

        Writes that only values on a GPU show are returned by a later call, once the GPU has compared them, or by
        `wait`.
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
        """Returns the names of written tensors that no call has returned yet; waits for the device."""
        unread, self._unread = self._unread, []
        return frozenset[str]().union(*(comparison.different() for comparison in unread))

    def _values_now(self) -> list[SampledValues]:
        return sampled_values({name: sample for name, (_, sample) in self._samples.items()})


def replaced(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of `before`, by name, that have been replaced by another tensor under the same name."""
    return {name: tensor for name, tensor in before.items() if now.get(name, tensor) is not tensor}


class TensorChanges:
    """Finds the tensors whose values a step changes.

    In the first step all values are compared. In later ones `TensorWrites` finds changes, without waiting for a GPU;
    only tensors that the first step wrote to without changing their values are compared in every step.
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
        """Returns the names of tensors that the step has changed; `now` are the tensors after it, by name."""
        written = self._writes.finish()
        unwritten = {name: tensor for name, tensor in self._tensors.items() if name not in written}
        earlier = replaced(unwritten, now) | self._before
        different = {name for name, value in earlier.items() if name in now and not same_tensor(value, now[name])}
        self._tensors, self._before = {}, {}
        if self._rewritten is None:
            self._rewritten = written - different
        return frozenset(different | (written - self._rewritten))
