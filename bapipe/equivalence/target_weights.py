"""How much the targets of a micro-batch count in a loss that is a mean over targets, such as words that are no padding.

The loss of a mini-batch is then no mean of its micro-batches' losses, but one by the weights of their targets. Which
losses are such means is not asked of their type: it is seen when they run, so that a loss may be torch's cross entropy
itself, or any code that reshapes, shifts or selects before it calls that, or `bapipe.weighted_mean`, and returns the
result, perhaps in another type or times a number. Where it computes further with it, each of these calls is scaled by
itself in training, so a loss may be a sum of several, and of other terms.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import BoundArguments, signature
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from bapipe.equivalence.outcome import Loss
from bapipe.equivalence.reached_state import KeptState
from bapipe.errors import one_line
from bapipe.losses import sum_of_weights, weighted_mean
from bapipe.torch_private import (
    FakeTensor,
    FakeTensorMode,
    autograd_mode,
    is_in_transform,
    quiet_fake_tensors,
    version,
)

_CROSS_ENTROPIES = {one: signature(one) for one in (functional.cross_entropy, functional.nll_loss)}

_SAME_MEAN = frozenset(
    {Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.cpu, Tensor.cuda,
     Tensor.mean, Tensor.sum, Tensor.squeeze, Tensor.clone, torch.mean, torch.sum, torch.squeeze, torch.clone}
)  # fmt: skip
"""What gives a mean, which is a scalar, as it is, perhaps of another type or elsewhere."""

_TIMES_A_NUMBER = frozenset(
    {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__, torch.mul, torch.div}
)

_TERMS = _SAME_MEAN | _TIMES_A_NUMBER | frozenset(
    {Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, torch.add, Tensor.sub, Tensor.sub_,
     Tensor.__sub__, Tensor.__rsub__, Tensor.__isub__, torch.sub, Tensor.neg, Tensor.__neg__, torch.neg, Tensor.mul_,
     Tensor.__imul__, Tensor.div_, Tensor.__itruediv__, torch.stack, torch.cat, Tensor.view, Tensor.reshape,
     torch.reshape, Tensor.unsqueeze, torch.unsqueeze, Tensor.flatten, torch.flatten, Tensor.__getitem__, torch.hstack,
     Tensor.type_as, Tensor.contiguous, Tensor.expand, Tensor.requires_grad_, Tensor.unbind, torch.unbind,
     Tensor.__iter__}
)  # fmt: skip
"""What gives a sum of terms if an argument is one; products have one such factor, and quotients no such divisor."""

_PRODUCTS = frozenset({Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, torch.mul})

_QUOTIENTS = frozenset({Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__, torch.div})

_SAYS_NOTHING = frozenset(
    {"__get__", "detach", "dim", "size", "numel", "ndimension", "stride", "element_size", "register_hook"}
)

_READS = frozenset({Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__index__})

MAX_MEANS = 16
"""As many means are scaled of a loss that computes several; if there are more, all micro-batches count alike."""


@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """A loss, and what it is a mean over; it may be so in another type, or times a number.

    Attributes:
        value: what the loss returned.
        num_means: how many means over targets it has computed.
        weight: the sum of the targets' weights in it, in float64 and without a dimension; None if the value is not
            seen to be a mean over targets, such as a mean over samples.
    """

    value: Tensor
    weight: Tensor | None
    num_means: int


def weighted_loss(loss: Loss, output: Any, target: Tensor) -> WeightedLoss:
    """Returns the loss of a micro-batch with its weight, if it is the result of a function that is known as a mean.

    Targets of classes without weight are ignored, which changes no value: where no target of a micro-batch has any
    weight, torch would divide zero by zero in the backward. A mean without targets counts as zero in sums.
    """
    with _Means(mean_weights=torch.full((MAX_MEANS,), nan, device=target.device)) as means:
        value = loss(output, target)
    return WeightedLoss(value, means.weight_of(value), len(means.weights))


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
class ScaledLoss:
    """A loss as it counts in the mini-batch, and the weights of the means over targets that it has computed."""

    value: Tensor
    weights: list[Tensor]


def scaled_loss(loss: Loss, output: Any, target: Tensor, means: MeanWeights | None) -> ScaledLoss:
    """Returns the loss of a micro-batch, such that the mean over micro-batches is the loss of the mini-batch.

    If it is a mean over targets, it is multiplied by its weight in this micro-batch, divided by the mean one; else each
    mean that it computes is, but in a function whose backward runs it again (`torch.utils.checkpoint`). A mean without
    targets becomes zero.
    """
    with _Means(mean_weights=None if means is None else means.calls) as noted:
        value = loss(output, target)
    weight = noted.weight_of(value)
    if means is not None and weight is not None:
        value = _scaled(value, weight, means.result)
    return ScaledLoss(value, noted.weights)


class WeightsAhead:
    """Tells the weights of a micro-batch's targets in its loss, before the model has computed the outputs.

    For that the loss runs on outputs without values, unless it keeps state that cannot be put back.
    """

    def __init__(self, loss: Loss, computed: Loss, outputs: Sequence[Tensor], device: torch.device) -> None:
        """`computed` calls `loss` with what the model returns, made of the tuple of `outputs`.

        These are on `device`; only their shapes and types are read.
        """
        self._loss, self.computed = loss, computed
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
        state = KeptState(self._loss)
        reached = state.obstacle or self._changes
        self.obstacle = None if reached is None else f"reaches {reached}"
        self._are_over_all = []
        with quiet_fake_tensors(), torch.no_grad(), state.restored():
            yield
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
        with _Means(self._stand_ins) as noted:
            if self._is_torch_s_own:  # much faster than on outputs
                value = self._loss(self._stand_ins[-1], target)
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
            twice = tuple(torch.cat([output, output]) if output.dim() else output for output in self._outputs)
            doubled = self._means(twice, torch.cat([target, target])).calls
        except Exception:  # whatever the code of the loss raises for another number of samples
            doubled = []
        if len(doubled) != len(means.calls):
            return []
        return [torch.isclose(two, 2 * one, equal_nan=True) for one, two in zip(means.calls, doubled, strict=True)]


def _computes_no_means(loss: Loss) -> bool:
    """Returns whether a loss is one of torch's that is no mean over targets by their weights."""
    function = loss.func if isinstance(loss, partial) else loss
    module = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(function, "__module__", "")
    return module in ("torch.nn.functional", "torch.nn.modules.loss") and not _is_torch_s_own(loss)


def _is_torch_s_own(loss: Loss) -> bool:
    """Returns whether a loss is a cross entropy of torch itself, whose weights depend on the targets alone."""
    function = loss.func if isinstance(loss, partial) else loss
    return any(function is one for one in _CROSS_ENTROPIES) or type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)


class _Means(TorchFunctionMode):
    """Notes the results of functions that are means over targets, with the sums of their weights.

    With stand-ins means are not computed: these are the results. With mean weights it is scaled, see `scaled_loss`.
    """

    def __init__(self, stand_ins: Sequence[Tensor] = (), mean_weights: Tensor | None = None) -> None:
        super().__init__()
        self._stand_ins, self._mean_weights = stand_ins, mean_weights
        self._mode = autograd_mode()
        self.weights: list[Tensor] = []  # of each mean
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}  # (result, weight), by the id of the result
        self._terms: dict[int, tuple[Tensor, frozenset[int]]] = {}  # (result, the means that are terms of it)
        self._no_terms: set[int] = set()  # the means that something else was computed from
        self._made: dict[int, Tensor] = {}  # what functions gave, which may be another one in each micro-batch
        self._has_read = False  # so that numbers may be others, too

    def terms_of(self, value: object) -> frozenset[int]:
        """Returns the numbers of the means of which a result is a sum, times what does not depend on them."""
        _, terms = self._terms.get(id(value), (None, frozenset[int]()))
        return terms - self._no_terms

    def weight_of(self, value: object) -> Tensor | None:
        """Returns the sum of the weights of a result; None if it is not known as a mean over targets."""
        _, weight = self._weights.get(id(value), (None, None))
        return weight

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if is_in_transform():  # of functions of single samples, as by `torch.vmap`
            return function(*args, **given)
        if function is weighted_mean:
            return self._noted(partial(weighted_mean, *args), sum_of_weights(*args))
        if function in _CROSS_ENTROPIES:
            call = _CROSS_ENTROPIES[function].bind(*args, **given)
            call.apply_defaults()
            if _is_mean_over_targets(call.arguments):
                return self._cross_entropy(function, call)
        if function is Tensor.__getitem__ and isinstance(args[0], FakeTensor):
            args = args[0], _without_masks(args[1])
        weight = self._weight_kept(function, args)
        terms = self._terms_kept(function, (*args, *given.values())) if self._stand_ins else frozenset[int]()
        result = function(*args, **given)
        self._weights.pop(id(result), None)  # it may be a mean that the function has changed, such as by adding to it
        if weight is not None:
            self._weights[id(result)] = result, weight
        self._has_read |= function in _READS
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and self._stand_ins:
                self._made[id(one)] = one
                if terms:
                    self._terms[id(one)] = one, terms
        return result

    def _terms_kept(self, function: Any, args: Sequence[Any]) -> frozenset[int]:
        """Returns the means that are terms of what a function gives, and notes those that are no terms any more."""
        nested = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else (arg,))]
        found = [self._terms[id(one)][1] for one in nested if id(one) in self._terms]
        if not found or _says_nothing_of_values(function):
            return frozenset()
        every = frozenset[int]().union(*found)
        others = [one for one in nested if id(one) not in self._terms]
        is_scaled = function in _PRODUCTS or function in _QUOTIENTS
        # What is made of targets or outputs is no constant.
        by_constants = len(found) == 1 and not self._has_read and not any(id(one) in self._made for one in others)
        is_divisor = function in _QUOTIENTS and id(args[0]) not in self._terms
        if function in _TERMS and (not is_scaled or (by_constants and not is_divisor)):
            return every
        self._no_terms |= every
        return frozenset()

    def _weight_kept(self, function: Any, args: Sequence[Any]) -> Tensor | None:
        """Returns the sum of the weights of what a function gives, if that is a mean in another type or scaled."""
        found = [weight for arg in args if (weight := self.weight_of(arg)) is not None]
        if len(found) != 1:
            return None
        others = [arg for arg in args if self.weight_of(arg) is None]
        is_scaled = function in _TIMES_A_NUMBER and all(isinstance(other, int | float) for other in others)
        is_scaled = is_scaled and not self._has_read
        return found[0] if function in _SAME_MEAN or is_scaled else None

    def _cross_entropy(self, function: Callable[..., Tensor], call: BoundArguments) -> Tensor:
        given = call.arguments
        given["target"] = given["target"].long()  # bytes cannot hold what is ignored
        weights = _weights(given["target"], given["weight"], given["ignore_index"])
        if given["weight"] is not None:
            given["target"] = given["target"].masked_fill(weights == 0, given["ignore_index"])
        return self._noted(partial(function, *call.args, **call.kwargs), weights.sum(dtype=torch.float64))

    def _noted(self, compute: Callable[[], Tensor], weight: Tensor) -> Tensor:
        result = self._stand_ins[len(self.weights) % len(self._stand_ins)] if self._stand_ins else compute()
        is_run_again = autograd_mode() != self._mode  # by the backward, outside of here
        if self._mean_weights is not None and len(self.weights) < MAX_MEANS and not is_run_again:
            result = _scaled(result, weight, self._mean_weights[len(self.weights)])
        self._terms[id(result)] = result, frozenset({len(self.weights)})
        self.weights.append(weight)
        self._weights[id(result)] = result, weight
        return result


def _says_nothing_of_values(function: Any) -> bool:
    """Returns whether the result of a function does not depend on the values of its argument, or has no gradient."""
    name = getattr(function, "__name__", "")
    is_known = name in (
        "__get__",
        "detach",
        "dim",
        "size",
        "numel",
        "ndimension",
        "stride",
        "element_size",
        "register_hook",
    )
    return is_known or name.startswith(("new_", "is_")) or name.endswith("_like")


def _scaled(mean: Tensor, weight: Tensor, mean_weight: Tensor) -> Tensor:
    """Returns a mean over the targets of a micro-batch as it counts in the mini-batch; nothing waits for a GPU."""
    # Without any target the mean may be no number; its gradients are zeros.
    counts = weight > 0
    exact = mean.to(torch.promote_types(mean.dtype, torch.float32))
    factor = torch.where(mean_weight.isnan(), 1, torch.where(counts, weight / mean_weight, 0)).to(exact.dtype)
    return torch.where(counts, exact * factor, torch.zeros_like(exact))


def _without_masks(index: Any) -> tuple[Any, ...]:
    """Returns an index with the places of masks instead: how many these are is not known of a tensor without values."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool and not isinstance(part, FakeTensor)
        parts += part.nonzero(as_tuple=True) if is_mask else (part,)
    return tuple(parts)


def _is_mean_over_targets(given: Mapping[str, Any]) -> bool:
    """Returns whether a call is a mean over classes that are targets, and all that counts in it has a weight.

    Smoothed labels of classes without weight count in the loss, and not in the sum that it is divided by. Targets that
    are probabilities of classes all count alike.
    """
    if given["reduction"] != "mean" or given["size_average"] is not None or given["reduce"] is not None:
        return False
    smoothed = given["weight"] is not None and bool(given.get("label_smoothing"))
    return not given["target"].is_floating_point() and not (smoothed and _has_zeros(given["weight"]))


_ZEROS = WeakIdKeyDictionary()
"""By tensor of class weights: its version, and whether any is zero, for which a GPU must be waited for."""


def _has_zeros(of_classes: Tensor) -> bool:
    if of_classes not in _ZEROS or _ZEROS[of_classes][0] != version(of_classes):
        _ZEROS[of_classes] = version(of_classes), bool((of_classes == 0).any())
    found: bool = _ZEROS[of_classes][1]
    return found


def _weights(target: Tensor, of_classes: Tensor | None, ignored: int) -> Tensor:
    """Returns the weight of each target."""
    counts = target.ne(ignored)
    if of_classes is None:
        return counts
    # Labels out of range are for the loss to refuse.
    return of_classes.detach().to(target.device)[target.clamp(0, len(of_classes) - 1)] * counts
