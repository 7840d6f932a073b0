"""Compares a loss over halves of the first samples that are trained on: what no example shows, real targets may."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bapipe.equivalence.losses import is_by_rows, loss_over_halves, uncounted
from bapipe.equivalence.target_weights import WeightsAhead
from bapipe.torch_private.tensors import tree_flatten, tree_unflatten

_MAX_BYTES = 2**25
"""Of outputs that are kept, so that a plan that just fits still does."""

_MAX_EQUAL = 10
"""Times that other samples are waited for."""


class _Samples(NamedTuple):
    rows: list[Tensor]
    target: Tensor
    weights: list[Tensor]


class FirstSamples:
    """The first samples of the first two micro-batches in which a loss is computed."""

    def __init__(self, ahead: WeightsAhead) -> None:
        self._ahead = ahead
        self._noted: list[_Samples] = []
        self._spec: Any = None
        self._num_equal, self._is_done = 0, False

    def note(self, output: Any, target: Tensor, weights: list[Tensor]) -> None:
        """Keeps the first samples of a micro-batch, and the weights of the means that its loss has computed."""
        if self._is_done or len(self._noted) == 2:
            return
        tensors, self._spec = tree_flatten(output)
        row_bytes = sum(tensor.nbytes // max(1, len(target)) for tensor in tensors)
        num = min(len(target), _MAX_BYTES // max(1, row_bytes))
        if num == 0 or not is_by_rows(output, len(target)):
            self._is_done = True
            return
        here = _Samples([tensor.detach()[:num].clone() for tensor in tensors], target[:num].clone(), weights)
        if self._noted and _are_equal(self._noted[0], here):  # a recomputing stage computes each loss twice
            self._num_equal += 1
            self._is_done = self._num_equal == _MAX_EQUAL
        else:
            self._noted.append(here)

    def fault(self) -> str | None:
        """Returns in which way the loss of samples is not the mean over their halves, see `loss_over_halves`.

        These are the first ones of the first micro-batch, and then as many of the first and of the second one. If the
        loss cannot be called once more, as its state could not be put back, the weights of its means are compared.
        None as long as two micro-batches are not noted, afterwards, or if it cannot be told. No graph that needs the
        loss's state may be alive: it is as before, but counts as changed.
        """
        if self._is_done or len(self._noted) < 2:
            return None
        first, second = self._noted
        self._noted, self._is_done = [], True
        if any(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first.rows, second.rows, strict=True)):
            return None  # as a parameter that has as many entries as there are samples is
        with self._ahead.running():
            if self._ahead.obstacle is not None:
                return uncounted(self._ahead.obstacle) if _are_unlike(first.weights, second.weights) else None
            for samples in (first, _joined(first, second)):
                found = loss_over_halves(self._ahead.computed, tree_unflatten(samples.rows, self._spec), samples.target)
                if found is not None:
                    return found
        return None


def _are_equal(one: _Samples, other: _Samples) -> bool:
    pairs = zip((*one.rows, one.target), (*other.rows, other.target), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _joined(one: _Samples, other: _Samples) -> _Samples:
    num = min(len(one.target), len(other.target))
    rows = [torch.cat([a[:num], b[:num]]) for a, b in zip(one.rows, other.rows, strict=True)]
    return _Samples(rows, torch.cat([one.target[:num], other.target[:num]]), [])


def _are_unlike(weights: list[Tensor], others: list[Tensor]) -> bool:
    return len(weights) == len(others) and any(float(a) != float(b) for a, b in zip(weights, others, strict=True))
