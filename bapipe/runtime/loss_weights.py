"""Weights of micro-batches in the loss of the mini-batch, for losses that are means over their targets."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from bapipe.equivalence import WeightedLoss, WeightsAhead
from bapipe.runtime.rng import PerOperatorRng


class LossWeights:
    """Weights each micro-batch by its targets; all have weight 1 if the loss is no mean over targets."""

    def __init__(
        self,
        ahead: WeightsAhead,
        microbatches: Collection[int],
        sum_over_replicas: Callable[[Tensor], Tensor],
        rng: PerOperatorRng,
    ) -> None:
        """`microbatches` are those of which this rank computes the loss."""
        self._ahead, self._microbatches = ahead, microbatches
        self._sum_over_replicas, self._rng = sum_over_replicas, rng
        self._is_over_targets: bool | None = None  # None before the first step, in which it is found out
        # Of the micro-batches' weights; None if all of them count alike, and NaN if they do in this step.
        self._mean: Tensor | None = None

    def begin(self, target: Tensor, num_microbatches: int) -> None:
        """Adds up the targets of a mini-batch; all replicas of the last stage call it together.

        The class weights are those that the loss has now: they may be others in every step.
        """
        self._mean = None
        if self._is_over_targets is False:
            return
        parts = target.chunk(num_microbatches)
        with self._ahead.running():
            own = [self._weight_ahead(microbatch, parts[microbatch]) for microbatch in self._microbatches]
        known = [weight for weight in own if weight is not None]
        zero = torch.zeros((), dtype=torch.float64, device=target.device)
        total, num_known = self._sum_over_replicas(torch.stack([torch.stack([zero, *known]).sum(), zero + len(known)]))
        if self._is_over_targets is None:
            self._is_over_targets = bool(num_known > 0) and not bool(total.isnan())
        if self._is_over_targets:
            self._mean = total / num_microbatches

    def weighted(self, loss: WeightedLoss) -> Tensor:
        """Returns the loss of a micro-batch, of which the mean over micro-batches is the loss of the mini-batch.

        What is not seen to be a mean over targets counts as it is, such as the zero that a loss returns where a
        micro-batch has no targets. Nothing here waits for a GPU.
        """
        if self._mean is None or loss.weight is None:
            return loss.value
        count_alike = self._mean.isnan()
        # Without any target the loss may be no number; its gradients are zeros.
        counts = count_alike | (loss.weight > 0)
        factor = torch.where(count_alike, 1, torch.where(counts, loss.weight / self._mean, 0)).to(loss.value.dtype)
        return torch.where(counts, loss.value * factor, torch.zeros_like(loss.value))

    def _weight_ahead(self, microbatch: int, target: Tensor) -> Tensor | None:
        self._rng.microbatch = microbatch
        self._rng.enter_loss()  # it may draw which targets count
        return self._ahead.of(target)
