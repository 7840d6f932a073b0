"""Weights of micro-batches in the loss of the mini-batch, for losses that are means over their targets."""

import logging
from collections.abc import Callable, Collection, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor

from bapipe.equivalence import MAX_MEANS, FirstSamples, Loss, WeightsAhead, scaled_loss
from bapipe.runtime.rng import PerOperatorRng

_log = logging.getLogger(__name__)


class LossWeights:
    """Weights each micro-batch by its targets in each of the means over targets that the loss computes."""

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
        self._num_means: int | None = None  # None before the first step, in which it is found out
        self._mean_weights: Tensor | None = None  # of this step, see `scaled_loss`
        self._first_samples = FirstSamples(ahead)

    def begin(self, target: Tensor, num_microbatches: int) -> None:
        """Adds up the targets of a mini-batch; all replicas of the last stage call it together.

        The class weights are those that the loss has now: they may be others in every step. After the first step
        nothing waits for a GPU.
        """
        self._mean_weights = None
        if self._num_means == 0:
            return
        parts = target.chunk(num_microbatches)
        with self._ahead.running():
            own = [self._weights_ahead(microbatch, parts[microbatch]) for microbatch in self._microbatches]
        total = self._sum_over_replicas(_sums(own, target.device))
        num, calls, squares = total[:3]
        # A micro-batch may compute none, where it has nothing to learn; else they compute the same ones.
        are_unlike = calls.isnan() | (calls * calls != num * squares)
        if self._num_means is None:
            self._num_means = 0 if bool(are_unlike) or not bool(calls) else int(calls / num)
        if self._num_means:
            count_alike = are_unlike | (calls != self._num_means * num)
            self._mean_weights = torch.where(count_alike, nan, total[3 : 3 + self._num_means] / num_microbatches)

    def computed(self, loss: Loss, output: Any, target: Tensor) -> Tensor:
        """Returns the loss of a micro-batch, of which the mean over micro-batches is the loss of the mini-batch.

        The first times, warns if it is not that.
        """
        value = scaled_loss(loss, output, target, self._mean_weights)
        fault = self._first_samples.fault(output, target)
        if fault is not None:
            _log.warning("for the first samples, %s", fault)
        return value

    def _weights_ahead(self, microbatch: int, target: Tensor) -> list[Tensor] | None:
        self._rng.microbatch = microbatch
        self._rng.enter_loss()  # it may draw which targets count
        return self._ahead.of(target)


def _sums(weights: Sequence[list[Tensor] | None], device: torch.device) -> Tensor:
    """Returns what replicas add up: [3 + MAX_MEANS], NaN in the first ones if weights are not known.

    These are the numbers of micro-batches with means, of means, and of the squares of these; and the means' weights.
    """
    known = [one for one in weights if one is not None and len(one) <= MAX_MEANS]
    sums = torch.zeros(3 + MAX_MEANS, dtype=torch.float64, device=device)
    if len(known) < len(weights):
        return sums.fill_(nan)
    for place, power in enumerate((0, 1, 2)):
        sums[place].fill_(sum(len(one) ** power for one in known if one))
    for one in known:
        for place, weight in enumerate(one, 3):
            sums[place] += weight
    return sums
