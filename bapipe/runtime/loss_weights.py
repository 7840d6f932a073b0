"""Weights of micro-batches in the loss of the mini-batch, for losses that are means over targets.

With such a loss, for example cross entropy that ignores padding, the mini-batch's loss is not the plain mean of its
micro-batches' losses: those with more targets have more weight.
"""

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
    """Computes losses of micro-batches, with each mean over targets weighted by the micro-batch's share of targets."""

    def __init__(
        self,
        ahead: WeightsAhead,
        microbatches: Collection[int],
        sum_over_replicas: Callable[[Tensor], Tensor],
        rng: PerOperatorRng,
        checked: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`microbatches` are those whose loss this rank computes.

        `checked` returns a context in which the loss runs until it has been computed once.
        """
        self._checked = checked
        self._ahead, self._microbatches = ahead, microbatches
        self._sum_over_replicas, self._rng = sum_over_replicas, rng
        self._mean_weights: MeanWeights | None = None  # of this step
        self._is_cut = False  # the mini-batch into several micro-batches
        self._had_means, self._has_warned = False, False
        self._first_samples = FirstSamples(ahead)

    def begin(self, target: Tensor, num_microbatches: int) -> None:
        """Sums the weights of a mini-batch's targets over the replicas of the last stage, which all call it together.

        This is done anew in every step, because class weights may change; nothing waits for a GPU. Once, the loss of
        the first samples is also compared with that of their halves (`FirstSamples`), which changes the state of the
        loss and restores it: here no graph of a step needs that state. One micro-batch is the mini-batch, whatever its
        loss depends on.
        """
        self._mean_weights, self._is_cut = None, num_microbatches > 1
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
        if self._ahead.obstacle is not None and self._had_means and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "all micro-batches of a step count alike, however many targets they have: the code of the loss %s",
                self._ahead.obstacle,
            )
        self._had_means = self._had_means or any(one is not None and one.calls for one in own)

    def computed(self, loss: Loss, output: Any, target: Tensor) -> Tensor:
        """Returns the loss of a micro-batch, weighted so that the mean over micro-batches is the mini-batch's loss."""
        with self._checked():
            scaled = weighted_loss(loss, output, target, self._mean_weights)
        self._checked = nullcontext
        if self._is_cut:
            self._first_samples.note(output, target, scaled)
        return scaled.value

    def _means_ahead(self, microbatch: int, target: Tensor) -> Means | None:
        self._rng.microbatch = microbatch
        self._rng.enter_loss()  # the loss may select targets at random
        with self._checked():
            return self._ahead.of(target)
