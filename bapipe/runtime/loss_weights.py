"""Weights of micro-batches in the loss of the mini-batch, for losses that are means over their targets."""

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from bapipe.equivalence.first_samples import FirstSamples
from bapipe.equivalence.outcome import Loss
from bapipe.equivalence.target_weights import (
    Means,
    MeanWeights,
    WeightsAhead,
    mean_weights,
    sums_of_weights,
    weighted_loss,
)
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
        checked: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`microbatches` are those of which this rank computes the loss.

        `checked` returns the context of the loss until it has been computed once.
        """
        self._checked = checked
        self._ahead, self._microbatches = ahead, microbatches
        self._sum_over_replicas, self._rng = sum_over_replicas, rng
        self._mean_weights: MeanWeights | None = None  # of this step
        self._had_means, self._is_told = False, False
        self._first_samples = FirstSamples(ahead)

    def begin(self, target: Tensor, num_microbatches: int) -> None:
        """Adds up the targets of a mini-batch; all replicas of the last stage call it together.

        The class weights are those that the loss has now: they may be others in every step. Nothing waits for a GPU.
        The first samples are compared once no graph needs what the loss keeps, which is changed and put back for that.
        """
        self._mean_weights = None
        fault = self._first_samples.fault()
        if fault is not None:
            _log.warning("for the first samples, %s", fault)
        if self._ahead.computes_no_means:
            return
        parts = target.chunk(num_microbatches)
        with self._ahead.running():
            own = [self._means_ahead(microbatch, parts[microbatch]) for microbatch in self._microbatches]
        sums = self._sum_over_replicas(sums_of_weights(own, target.device))
        self._mean_weights = mean_weights(sums, num_microbatches)
        if self._ahead.obstacle is not None and self._had_means and not self._is_told:
            self._is_told = True
            _log.warning("all micro-batches of a step count alike: the code of the loss %s", self._ahead.obstacle)
        self._had_means = self._had_means or any(one is not None and one.calls for one in own)

    def computed(self, loss: Loss, output: Any, target: Tensor) -> Tensor:
        """Returns the loss of a micro-batch, of which the mean over micro-batches is the loss of the mini-batch."""
        with self._checked():
            scaled = weighted_loss(loss, output, target, self._mean_weights)
        self._checked = nullcontext
        self._first_samples.note(output, target, scaled.weights)
        return scaled.value

    def _means_ahead(self, microbatch: int, target: Tensor) -> Means | None:
        self._rng.microbatch = microbatch
        self._rng.enter_loss()  # it may draw which targets count
        with self._checked():
            return self._ahead.of(target)
