"""How much the targets of a micro-batch count in a loss that is a mean over targets, such as words that are no padding.

The loss of a mini-batch is then no mean of its micro-batches' losses, but one by the weights of their targets. Which
losses are such means is not asked of their type: it is seen when they run, so that a loss may be torch's cross entropy
itself, or any code that reshapes, shifts or selects before it calls that, or `bapipe.weighted_mean`, and returns the
result, perhaps in another type or times a number. Where it computes further with it, each of these calls is scaled by
itself in training, so a loss may be a sum of several, and of other terms.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bapipe.equivalence.noted_means import CROSS_ENTROPIES, MAX_MEANS, NotedMeans, scaled_mean
from bapipe.equivalence.outcome import Loss
from bapipe.equivalence.sample_dims import SampleDim, doubled
from bapipe.errors import one_line
from bapipe.module_state.python_state import state_restored
from bapipe.module_state.reached_state import KeptState
from bapipe.torch_private.tensors import FakeTensor, FakeTensorMode, limit_fake_tensor_cache, quiet_fake_tensors


class Means(NamedTuple):
    """The means over targets that a loss computes of a micro-batch.

    Attributes:
        result: the weight of the one mean that the loss is, perhaps in another type or times a number; None if it is
            none, such as a sum of several.
        calls: the weights of all that it computes, in order; NaN of those that are no terms of it, such as a noted
            figure, or a mean that it squares.
    """

    result: Tensor | None
    calls: list[Tensor]


class MeanWeights(NamedTuple):
    """The means of weights over the micro-batches of a mini-batch, in float64; NaN where these count alike.

    Attributes:
        result: of the mean that the loss is.
        calls: of those that it computes, [MAX_MEANS]; NaN, too, if it is a mean itself.
    """

    result: Tensor
    calls: Tensor


def sums_of_weights(means: Sequence[Means | None], device: torch.device) -> Tensor:
    """Returns what `mean_weights` needs of micro-batches, None of which is not known: to be added up over replicas.

    These are the numbers of micro-batches with means, of those that are one mean, of means, and of the squares of the
    last; the weights of results; and those of calls. [5 + MAX_MEANS]
    """
    sums = torch.zeros(5 + MAX_MEANS, dtype=torch.float64, device=device)
    known = [one for one in means if one is not None]
    if len(known) < len(means):
        return sums.fill_(nan)
    numbers = [len(one.calls) for one in known]
    squares = sum(number**2 for number in numbers) if max(numbers, default=0) <= MAX_MEANS else nan
    one_mean = [one.result for one in known if one.result is not None]
    for place, number in enumerate((sum(map(bool, numbers)), len(one_mean), sum(numbers), squares)):
        sums[place].fill_(number)
    for weight in one_mean:
        sums[4] += weight
    for one in known:
        for place, weight in enumerate(one.calls[:MAX_MEANS], 5):
            sums[place] += weight
    return sums


def mean_weights(sums: Tensor, num_microbatches: int) -> MeanWeights:
    """Returns the mean weights of a mini-batch, of the sums over all its micro-batches.

    A micro-batch may compute no mean, where it has nothing to learn; else all must compute the same ones.
    """
    num, num_results, num_calls, squares = sums[:4]
    is_one_mean = num == num_results
    are_the_same = ~is_one_mean & (num_calls * num_calls == num * squares)
    weights = sums[4:] / num_microbatches
    return MeanWeights(torch.where(is_one_mean, weights[0], nan), torch.where(are_the_same, weights[1:], nan))


@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """A loss, and what it is a mean over.

    Attributes:
        value: of the loss, as it counts in the mini-batch.
        weight: the sum of the targets' weights in it, in float64 and without a dimension; None if the loss is not seen
            to be a mean over targets, perhaps in another type or times a number, such as a mean over samples.
        weights: the same of each mean over targets that it has computed.
    """

    value: Tensor
    weight: Tensor | None
    weights: list[Tensor]


def weighted_loss(loss: Loss, output: Any, target: Tensor, means: MeanWeights | None) -> WeightedLoss:
    """Returns the loss of a micro-batch, such that the mean over micro-batches is the loss of the mini-batch.

    If it is a mean over targets, it is multiplied by its weight in this micro-batch, divided by the mean one; else each
    mean that it computes is, but in a function whose backward runs it again (`torch.utils.checkpoint`). A mean without
    targets becomes zero. Without `means` micro-batches count alike, and such a mean is what torch gives.

    Targets of classes without weight are ignored, which changes no value: where no target of a micro-batch has any
    weight, torch would divide zero by zero in the backward.
    """
    with NotedMeans(mean_weights=None if means is None else means.calls) as noted:
        value = loss(output, target)
    weight = noted.weight_of(value)
    if means is not None and weight is not None:
        value = scaled_mean(value, weight, means.result)
    return WeightedLoss(value, weight, noted.weights)


def counting_alike(device: torch.device) -> MeanWeights:
    """Returns the mean weights with which micro-batches count alike, and means without targets are zero."""
    unknown = torch.full((1 + MAX_MEANS,), nan, dtype=torch.float64, device=device)
    return MeanWeights(unknown[0], unknown[1:])


class WeightsAhead:
    """Tells the weights of a micro-batch's targets in its loss, before the model has computed the outputs.

    For that the loss runs on outputs without values, unless it keeps state that cannot be put back.
    """

    def __init__(
        self, loss: Loss, computed: Loss, outputs: Sequence[Tensor], dims: Sequence[SampleDim], device: torch.device
    ) -> None:
        """`computed` calls `loss` with what the model returns, made of the tuple of `outputs`.

        These are on `device`; only their shapes and types are read. `dims` says where they have their samples.
        """
        self.loss, self.computed, self.dims = loss, computed, tuple(dims)
        self._is_torch_s_own, self.computes_no_means = _is_torch_s_own(loss), _computes_no_means(loss)
        self.obstacle: str | None = None  # why `of` tells nothing, in words of what the loss does
        self._changes: str | None = None  # what it has changed that could not be put back
        with FakeTensorMode(allow_non_fake_inputs=True):
            self._outputs = tuple(torch.empty_like(output, device=device) for output in outputs)
            self._stand_ins = tuple(torch.empty((), device=device) for _ in range(2 * MAX_MEANS))
        self._are_over_all: list[Tensor] = []  # of each mean, whether it is over all samples; of a step

    @contextmanager
    def running(self) -> Iterator[None]:
        """`of` is called in this context only."""
        state = KeptState(self.loss, partial(state_restored, compares=False, outside=False))
        reached = state.obstacle or self._changes
        self.obstacle = None if reached is None else f"reaches {reached}"
        self._are_over_all = []
        with quiet_fake_tensors(), torch.no_grad(), state.restored():
            yield
        limit_fake_tensor_cache()  # a number that changes from step to step makes every operator a new one
        self._changes = self._changes or state.obstacle

    def of(self, target: Tensor) -> Means | None:
        """Returns the means over targets that the loss will compute; None if that cannot be told."""
        if self.obstacle is not None:
            return None
        try:
            means = self._means(self._outputs, target)
        except Exception as error:  # whatever the code of the loss raises where a value of an output is missing
            self.obstacle = f"reads values of outputs, as `.item()` does ({one_line(error)[:80]})"
            return None
        if any(isinstance(weight, FakeTensor) for weight in means.calls):
            self.obstacle = "weights by what the model returns"
            return None
        return means if means.result is not None or not means.calls else self._of_all_samples(means, target)

    def _means(self, outputs: Sequence[Tensor], target: Tensor) -> Means:
        with NotedMeans(self._stand_ins) as noted:
            if self._is_torch_s_own:  # much faster than on outputs
                value = self.loss(self._stand_ins[-1], target)
            else:
                value = self.computed(outputs, target.clone())  # it may change them
        unknown = torch.full((), nan, dtype=torch.float64, device=target.device)
        terms = noted.terms_of(value)
        return Means(noted.weight_of(value), [w if i in terms else unknown for i, w in enumerate(noted.weights)])

    def _of_all_samples(self, means: Means, target: Tensor) -> Means:
        """Returns of several means those over all samples: of twice the samples they have twice the weight.

        A loss may compute means of single samples, too, which all count alike. The first micro-batch tells for others.
        """
        if len(self._are_over_all) != len(means.calls):
            self._are_over_all = self._find_over_all(means, target)
        pairs = zip(means.calls, self._are_over_all, strict=False)  # none if they are of samples
        return Means(None, [torch.where(is_over_all, one, nan) for one, is_over_all in pairs])

    def _find_over_all(self, means: Means, target: Tensor) -> list[Tensor]:
        try:
            twice = tuple(doubled(*pair) for pair in zip(self._outputs, self.dims, strict=True))
            found = self._means(twice, torch.cat([target, target])).calls
        except Exception as error:  # whatever the code of the loss raises for another number of samples
            self.obstacle = f"fails on twice the samples of a micro-batch ({one_line(error)[:80]})"
            return []
        if len(found) != len(means.calls):
            return []
        return [torch.isclose(two, 2 * one, equal_nan=True) for one, two in zip(means.calls, found, strict=True)]


def _computes_no_means(loss: Loss) -> bool:
    """Returns whether a loss is one of torch's that is no mean over targets by their weights."""
    function = loss.func if isinstance(loss, partial) else loss
    module = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(function, "__module__", "")
    return module in ("torch.nn.functional", "torch.nn.modules.loss") and not _is_torch_s_own(loss)


def _is_torch_s_own(loss: Loss) -> bool:
    """Returns whether a loss is a cross entropy of torch itself, whose weights depend on the targets alone."""
    function = loss.func if isinstance(loss, partial) else loss
    return any(function is one for one in CROSS_ENTROPIES) or type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)
