"""Weights of micro-batches in the loss of the mini-batch, for losses that are means over the targets not ignored."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor


class LossWeights:
    """Weights each micro-batch by its targets that are not ignored; all have weight 1 if the loss ignores none."""

    def __init__(
        self, ignored: int | None, microbatches: Collection[int], sum_over_replicas: Callable[[Tensor], Tensor]
    ) -> None:
        """`microbatches` are those of which this rank computes the loss; `ignored` is None if the loss ignores none."""
        self._ignored, self._microbatches, self._sum_over_replicas = ignored, microbatches, sum_over_replicas
        self._mean: Tensor | None = None  # number of targets that are not ignored, per micro-batch

    def begin(self, target: Tensor, num_microbatches: int) -> None:
        """Counts the targets of a mini-batch; all replicas of the last stage call it together."""
        self._mean = None
        if self._ignored is None or target.is_floating_point():
            return
        parts = target.chunk(num_microbatches)
        own = [self._count(parts[microbatch]) for microbatch in self._microbatches]
        total = torch.stack([torch.zeros((), dtype=torch.float64, device=target.device), *own]).sum()
        self._mean = self._sum_over_replicas(total) / num_microbatches

    def weighted(self, loss: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of a micro-batch, of which the mean over micro-batches is the loss of the mini-batch."""
        if self._mean is None:
            return loss
        count = self._count(target)
        # Without any target the loss is no number; its gradients are zeros.
        return torch.where(count > 0, loss * (count / self._mean).to(loss.dtype), torch.zeros_like(loss))

    def _count(self, target: Tensor) -> Tensor:
        assert self._ignored is not None
        return target.ne(self._ignored).sum(dtype=torch.float64)
