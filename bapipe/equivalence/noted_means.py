"""Sees which means over targets a loss computes: calls of torch's cross entropy and of `bapipe.weighted_mean`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import BoundArguments, signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from bapipe.losses import sum_of_weights, weighted_mean
from bapipe.torch_private.tensors import FakeTensor, autograd_mode, is_in_transform, version

CROSS_ENTROPIES = {one: signature(one) for one in (functional.cross_entropy, functional.nll_loss)}

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


class NotedMeans(TorchFunctionMode):
    """Notes the results of functions that are means over targets, with the sums of their weights.

    With stand-ins means are not computed: these are the results. With mean weights it is scaled, see `weighted_loss`.
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
        if function in CROSS_ENTROPIES:
            call = CROSS_ENTROPIES[function].bind(*args, **given)
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
            result = scaled_mean(result, weight, self._mean_weights[len(self.weights)])
        self._terms[id(result)] = result, frozenset({len(self.weights)})
        self.weights.append(weight)
        self._weights[id(result)] = result, weight
        return result


def _says_nothing_of_values(function: Any) -> bool:
    """Returns whether the result of a function does not depend on the values of its argument, or has no gradient."""
    name = getattr(function, "__name__", "")
    return name in _SAYS_NOTHING or name.startswith(("new_", "is_")) or name.endswith("_like")


def scaled_mean(mean: Tensor, weight: Tensor, mean_weight: Tensor) -> Tensor:
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
