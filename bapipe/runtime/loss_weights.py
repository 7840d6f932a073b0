"""Weights of micro-batches in the loss of the mini-batch, for losses that are means over their targets."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from bapipe.equivalence import TargetWeights, target_weights
from bapipe.runtime.local_stage import Loss


class LossWeights:
    """Weights each micro-batch by its targets; all have weight 1 if the loss is no mean over targets."""

    def __init__(
        self,
        loss: Loss,
        microbatches: Collection[int],
        sum_over_replicas: Callable[[Tensor], Tensor],
    ) -> None:
        """`microbatches` are those of which this rank computes the loss."""
        self._loss, self._microbatches, self._sum_over_replicas = loss, microbatches, sum_over_replicas
        self._weights: TargetWeights | None = None  # None if all micro-batches of the mini-batch count alike
        self._mean: Tensor | None = None  # of the micro-batches' sums of weights

    def begin(self, target: Tensor, num_microbatches: int) -> None:
        """Adds up the targets of a mini-batch; all replicas of the last stage call it together.

        The class weights are those that the loss has now: they may be others in every step.
        """
        self._weights = None if target.is_floating_point() else target_weights(self._loss)
        if self._weights is None:
            return
        parts = target.chunk(num_microbatches)
        own = [self._weights.total(parts[microbatch]) for microbatch in self._microbatches]
        total = torch.stack([torch.zeros((), dtype=torch.float64, device=target.device), *own]).sum()
        self._mean = self._sum_over_replicas(total) / num_microbatches

    def counted(self, target: Tensor) -> Tensor:
        """Returns the targets of a micro-batch as its loss is to take them."""
        return target if self._weights is None else self._weights.counted(target)

    def weighted(self, loss: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of a micro-batch, of which the mean over micro-batches is the loss of the mini-batch."""
        if self._weights is None:
            return loss
        assert self._mean is not None
        total = self._weights.total(target)
        # Without any target the loss is no number; its gradients are zeros.
        return torch.where(total > 0, loss * (total / self._mean).to(loss.dtype), torch.zeros_like(loss))
