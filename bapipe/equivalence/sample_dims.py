"""Where the samples are in the tensors that a model returns, as their shapes for two numbers of samples tell.

Most have them in the first dimension, but recurrent networks and transformers may return (words, samples, channels),
others one row for each word of all samples, a parameter, or a value of the whole batch, such as the balance of experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bapipe.torch_private.tensors import TreeSpec, tree_flatten, tree_unflatten
from bapipe.tracing.sizes import proportional_dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDim:
    """The dimension of a tensor in which the samples are.

    Attributes:
        dim: the dimension; None if the shape is the same for every number of samples.
        per_sample: how many entries along it a sample has, such as its words; None if this may be another number for
            each, as where the words of all samples are selected.
        is_constant: whether the values are the same for all samples, as those of a parameter are; `dim` is None.
        is_mean: whether it is a number, the mean of what it is of single samples; `dim` is None.
    """

    dim: int | None
    per_sample: int | None = 1
    is_constant: bool = False
    is_mean: bool = False

    @property
    def is_own(self) -> bool:
        """Whether the dimension is that of the samples alone."""
        return self.dim is not None and self.per_sample == 1

    @property
    def is_of_batch(self) -> bool:
        """Whether it is a value of the whole batch, and not known to be the mean of those of samples."""
        return self.dim is None and not self.is_constant and not self.is_mean


BY_ROWS = SampleDim(dim=0)
CONSTANT = SampleDim(dim=None, is_constant=True)
OF_BATCH = SampleDim(dim=None)
MEAN = SampleDim(dim=None, is_mean=True)
UNKNOWN = SampleDim(dim=0, per_sample=None)


def sample_dim(shape: Sequence[int], other: Sequence[int], num_samples: int, num_other: int) -> SampleDim:
    """Returns where a tensor has its samples, by its shapes for two numbers of samples."""
    found = proportional_dimension(shape, other, num_samples, num_other)
    if found is not None:
        return SampleDim(dim=found[0], per_sample=found[1])
    return OF_BATCH if tuple(shape) == tuple(other) else UNKNOWN


def sample_dims(
    tensors: Sequence[Tensor], others: Sequence[Tensor], num_samples: int, num_other: int
) -> list[SampleDim]:
    """Returns where tensors have their samples, by what the same model has returned for another number of samples."""
    return [
        CONSTANT if torch.equal(one, other) else sample_dim(one.shape, other.shape, num_samples, num_other)
        for one, other in zip(tensors, others, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What a model returns for some samples.

    Attributes:
        num: how many there are.
        tensors: those among the leaves, in their order; with each comes in `dims` where it has its samples. A mean
            over samples is here that of each sample, [num, *shape], as far as it is known.
        leaves, spec: the whole, as torch's `tree_flatten` gives it, with None in place of tensors.
        places: of the tensors among the leaves.
        is_interleaved: whether the entries of samples that share a dimension are those of words × samples, not of
            samples × words, which no shape tells.
    """

    num: int
    tensors: tuple[Tensor, ...]
    dims: tuple[SampleDim, ...]
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: TreeSpec
    is_interleaved: bool = False

    @classmethod
    def of(cls, output: Any, dims: Sequence[SampleDim], num: int) -> "Samples":
        """Returns a model's output as samples."""
        leaves, spec = tree_flatten(output)
        places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        pairs = zip((leaves[place].detach() for place in places), dims, strict=True)
        tensors = tuple(tensor.expand(num, *tensor.shape) if where.is_mean else tensor for tensor, where in pairs)
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(num=num, tensors=tensors, dims=tuple(dims), leaves=others, places=places, spec=spec)

    def output(self, tensors: Iterable[Tensor] | None = None) -> Any:
        """Returns the output; of other tensors, if they are given."""
        leaves = list(self.leaves)
        given = self.tensors if tensors is None else tensors
        for place, tensor, where in zip(self.places, given, self.dims, strict=True):
            leaves[place] = tensor.mean(0) if where.is_mean else tensor
        return tree_unflatten(leaves, self.spec)

    def obstacle(self) -> str | None:
        """Returns why the samples cannot be told apart, in words; None if they can."""
        for tensor, where in zip(self.tensors, self.dims, strict=True):
            if where.dim is None:
                continue
            if where.per_sample is None or tensor.shape[where.dim] != self.num * where.per_sample:
                return f"has no dimension of the samples in the tensor of shape {tuple(tensor.shape)} that it returns"
        return None

    def ways(self) -> list["Samples"]:
        """Returns these samples in each way in which they may share a dimension."""
        share = any(where.dim is not None and not where.is_own for where in self.dims)
        return [replace(self, is_interleaved=way) for way in ((False, True) if share else (False,))]

    def select(self, samples: range) -> "Samples":
        """Returns some of the samples, which stand one after another; without copies, if no dimension is shared."""
        pairs = zip(self.tensors, self.dims, strict=True)
        return replace(self, num=len(samples), tensors=tuple(self._select(*pair, samples) for pair in pairs))

    def joined(self, other: "Samples") -> "Samples":
        """Returns these samples and as many others behind them; what has no dimension of them is as here."""
        pairs = zip(self.tensors, other.tensors, self.dims, strict=True)
        return replace(self, num=2 * self.num, tensors=tuple(self._joined(*three) for three in pairs))

    def _select(self, tensor: Tensor, where: SampleDim, samples: range) -> Tensor:
        if where.is_mean:
            return tensor[samples.start : samples.stop]
        if where.dim is None:
            return tensor
        apart, dim = self._apart(tensor, where)
        return _as_it_was(apart.narrow(dim, samples.start, len(samples)), where)

    def _joined(self, one: Tensor, other: Tensor, where: SampleDim) -> Tensor:
        if where.is_mean:
            return torch.cat([one, other])
        if where.dim is None:
            return one
        (first, dim), (second, _) = self._apart(one, where), self._apart(other, where)
        return _as_it_was(torch.cat([first, second], dim), where)

    def _apart(self, tensor: Tensor, where: SampleDim) -> tuple[Tensor, int]:
        """Returns a tensor of which one dimension is that of the samples alone, and this dimension."""
        assert where.dim is not None
        assert where.per_sample is not None
        if where.is_own:
            return tensor, where.dim
        if self.is_interleaved:
            return _unflattened(tensor, where.dim, (where.per_sample, self.num)), where.dim + 1
        return _unflattened(tensor, where.dim, (self.num, where.per_sample)), where.dim


def _unflattened(tensor: Tensor, dim: int, sizes: tuple[int, int]) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


def _as_it_was(apart: Tensor, where: SampleDim) -> Tensor:
    return apart if where.dim is None or where.is_own else apart.flatten(where.dim, where.dim + 1)


def doubled(tensor: Tensor, where: SampleDim) -> Tensor:
    """Returns a tensor without values for twice as many samples."""
    return tensor if where.dim is None or not tensor.dim() else torch.cat([tensor, tensor], where.dim)
