"""The content of tensors, and which have changed: by torch's counts of writes, so that no device is waited for."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bapipe.torch_private.tensors import version


def content(tensor: Tensor) -> bytes:
    """Returns the values of a tensor as they lie in memory, row after row."""
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


class TensorVersions:
    """Tensors as they are now, with torch's count of the writes to each.

    Not counted are writes to `tensor.data`, and those of kernels that do not tell torch: batch norm's to its running
    mean and variance.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: (tensor, version(tensor)) for name, tensor in tensors.items()}

    def written(self) -> frozenset[str]:
        """Returns the names of the tensors that have been written to since."""
        return frozenset(name for name, (tensor, count) in self._tensors.items() if version(tensor) != count)

    def replaced(self, now: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors in whose place there is now another one, which was assigned."""
        return {name: tensor for name, (tensor, _) in self._tensors.items() if now.get(name, tensor) is not tensor}


class TensorChanges:
    """Finds the tensors whose values a step changes.

    The first step is found by comparing values. For later ones counts tell, so that a GPU is not waited for; but what
    the first step has written to without changing it is compared in each.
    """

    def __init__(self) -> None:
        self._rewritten: frozenset[str] | None = None  # names; None in the first step
        self._before: dict[str, Tensor] = {}
        self._versions = TensorVersions({})

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Remembers tensors by name, before a step."""
        compared = tensors if self._rewritten is None else self._rewritten & tensors.keys()
        self._before = {name: tensors[name].detach().clone() for name in compared}
        self._versions = TensorVersions(tensors)

    def changed(self, now: Mapping[str, Tensor]) -> frozenset[str]:
        """Returns the names of those that the step has changed; `now` are the tensors after it."""
        written, replaced = self._versions.written(), self._versions.replaced(now)
        earlier = {name: value for name, value in replaced.items() if name not in written} | self._before
        different = {name for name, value in earlier.items() if name in now and not are_equal(value, now[name])}
        self._before, self._versions = {}, TensorVersions({})
        if self._rewritten is None:
            self._rewritten = written - different
        return frozenset(different | (written - self._rewritten))


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same values; one that is NaN in both is the same."""
    if torch.equal(a, b):
        return True
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
