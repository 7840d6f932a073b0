"""Compares a loss over halves of the first samples that are trained on: what no example shows, real targets may."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bapipe.equivalence.ignored_labels import labels_in_code
from bapipe.equivalence.loss_state import state_of_loss
from bapipe.equivalence.losses import loss_over_halves, of_whole, uncompared, uncounted
from bapipe.equivalence.sample_dims import Samples
from bapipe.equivalence.target_weights import WeightedLoss, WeightsAhead
from bapipe.errors import one_line
from bapipe.module_state.python_random import all_generators_restored
from bapipe.module_state.python_state import same_tensor

_MAX_BYTES = 2**25
"""Of outputs that are kept, so that a plan that just fits still does."""

_MAX_EQUAL = 10
"""Times that other samples are waited for."""


class _Noted(NamedTuple):
    samples: Samples
    target: Tensor
    weights: list[Tensor]
    is_exact: bool  # of a loss that is a mean over targets, which is weighted by them


class FirstSamples:
    """The first samples of the first two micro-batches in which a loss is computed."""

    def __init__(self, ahead: WeightsAhead) -> None:
        self._ahead = ahead
        self._noted: list[_Noted] = []
        self._obstacle: str | None = None  # why they cannot be compared, to be said
        self._num_equal, self._is_done = 0, False

    def note(self, output: Any, target: Tensor, found: WeightedLoss) -> None:
        """Keeps the first samples of a micro-batch, and the weights of the means that its loss has computed."""
        if self._is_done or len(self._noted) == 2:
            return
        samples, is_exact = Samples.of(output, self._ahead.dims, len(target)), found.weight is not None
        obstacle = samples.obstacle() or _is_too_large(samples)
        if obstacle is not None:
            self._is_done = True
            self._obstacle = None if is_exact or self._ahead.computes_no_means else f"the model {obstacle}"
            return
        kept = _copied(samples.select(range(_num_kept(samples))))
        here = _Noted(kept, target[: kept.num].clone(), found.weights, is_exact)
        if self._noted and _are_equal(self._noted[0], here):  # a recomputing stage computes each loss twice
            self._num_equal += 1
            self._is_done = self._num_equal == _MAX_EQUAL
        else:
            self._noted.append(here)

    def fault(self) -> str | None:
        """Returns in which way the loss of samples is not the mean over their halves, see `loss_over_halves`.

        These are the first ones of the first micro-batch, and then as many of the first and of the second one. If the
        loss cannot be called once more, as its state could not be put back, the weights of its means are compared. A
        loss that cannot be compared, or reads a value of a whole micro-batch, is a fault unless it is a mean by its
        targets. None as long as two micro-batches are not noted, and afterwards. No graph that needs the loss's state
        may be alive: it is as before, but counts as changed.
        """
        known, self._obstacle = self._obstacle, None
        if known is not None:
            return uncompared(known)
        if self._is_done or len(self._noted) < 2:
            return None
        first, second = self._noted
        self._noted, self._is_done = [], True
        with self._ahead.running(), torch.no_grad(), all_generators_restored():
            obstacle, found = self._compared(first, second)
        if obstacle is None or (first.is_exact and second.is_exact):
            return found
        return uncompared(obstacle)

    def _compared(self, first: _Noted, second: _Noted) -> tuple[str | None, str | None]:
        """Returns why the loss cannot be compared, and in which way it is not the mean over halves."""
        if self._ahead.obstacle is not None:
            is_seen = _are_unlike(first.weights, second.weights)
            return (None, uncounted(self._ahead.obstacle)) if is_seen else (f"its code {self._ahead.obstacle}", None)
        try:
            if self._is_another_each_time(first):
                return "it is another one for the same samples, as where it draws random numbers", None
            return None, self._value_of_whole_read(first, second) or self._fault_over_halves(first, second)
        except Exception as error:  # whatever the code of the loss raises
            return f"it fails on other numbers of samples ({one_line(error)[:80]})", None

    def _is_another_each_time(self, noted: _Noted) -> bool:
        one, other = (self._ahead.computed(noted.samples.output(), noted.target.clone()) for _ in range(2))
        return not same_tensor(one, other)

    def _value_of_whole_read(self, first: _Noted, second: _Noted) -> str | None:
        """Returns that the loss reads a value of the whole micro-batch; None if it does not."""
        value = self._ahead.computed(first.samples.output(), first.target.clone())
        for changed, tensor in _with_other_values_of_whole(first.samples, second.samples):
            if not same_tensor(self._ahead.computed(changed, first.target.clone()), value):
                return of_whole(tensor.shape)
        return None

    def _fault_over_halves(self, first: _Noted, second: _Noted) -> str | None:
        """Returns in which way the loss is not the mean over halves of the first samples, and of those of both."""
        loss, labels = self._ahead.computed, labels_in_code(state_of_loss(self._ahead.loss, nn.Module()))
        ways = list(zip(first.samples.ways(), second.samples.ways(), strict=True))
        num, even = min(first.samples.num, second.samples.num), first.samples.num // 2 * 2
        found, is_compared = None, False
        with suppress(Exception):  # a loss may take whole micro-batches alone
            if even:
                own = [way.select(range(even)) for way, _ in ways]
                found = loss_over_halves(loss, own, first.target[:even], labels)
                is_compared = True
        if found is not None:
            return found
        try:
            both = [one.select(range(num)).joined(other.select(range(num))) for one, other in ways]
            return loss_over_halves(loss, both, torch.cat([first.target[:num], second.target[:num]]), labels)
        except Exception:  # or no more than a micro-batch; or sentences are longer in one than in the other
            if not is_compared:
                raise
            return None


def _num_kept(samples: Samples) -> int:
    """Returns how many samples can be kept, of tensors that are not constant."""
    pairs = list(zip(samples.tensors, samples.dims, strict=True))
    of_whole_bytes = sum(tensor.nbytes for tensor, where in pairs if where.dim is None and not where.is_constant)
    sample_bytes = sum(tensor.nbytes // samples.num for tensor, where in pairs if where.dim is not None)
    return min(samples.num, max(0, _MAX_BYTES - of_whole_bytes) // max(1, sample_bytes))


def _is_too_large(samples: Samples) -> str | None:
    num = _num_kept(samples)
    if num == samples.num or (num and len(samples.ways()) == 1):
        return None
    return f"returns more than {_MAX_BYTES // 2**20} MiB for {'a sample' if num == 0 else 'these samples'}"


def _copied(samples: Samples) -> Samples:
    """Returns samples that others may overwrite; a constant, such as a parameter, is as it then is."""
    pairs = zip(samples.tensors, samples.dims, strict=True)
    return replace(samples, tensors=tuple(t if where.is_constant else t.clone() for t, where in pairs))


def _with_other_values_of_whole(samples: Samples, others: Samples) -> Iterator[tuple[Any, Tensor]]:
    """Yields outputs of which a tensor of the whole micro-batch has other values, and that tensor."""
    for i, (one, other, where) in enumerate(zip(samples.tensors, others.tensors, samples.dims, strict=True)):
        if where.is_of_batch and one.dtype != torch.bool:
            changed = one + 1 if torch.equal(one, other) else other
            yield samples.output((*samples.tensors[:i], changed, *samples.tensors[i + 1 :])), one


def _are_equal(one: _Noted, other: _Noted) -> bool:
    triples = zip(one.samples.tensors, other.samples.tensors, one.samples.dims, strict=True)
    pairs = [(one.target, other.target), *((a, b) for a, b, where in triples if not where.is_constant)]
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _are_unlike(weights: list[Tensor], others: list[Tensor]) -> bool:
    return len(weights) == len(others) and any(float(a) != float(b) for a, b in zip(weights, others, strict=True))
