"""Compares a loss over halves of the first samples that are trained on: what no example shows, real targets may."""

from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from bapipe.equivalence.losses import is_by_rows, loss_over_halves
from bapipe.equivalence.target_weights import WeightsAhead
from bapipe.torch_private import tree_flatten, tree_unflatten

_MAX_BYTES = 2**25
"""Of outputs that are kept, so that a plan that just fits still does."""


class FirstSamples:
    """The first samples of the first two micro-batches in which a loss is computed."""

    def __init__(self, ahead: WeightsAhead) -> None:
        self._ahead = ahead
        self._first: tuple[list[Tensor], Tensor] | None = None
        self._is_done = False

    def fault(self, output: Any, target: Tensor) -> str | None:
        """Returns in which way the loss of samples is not the mean over their halves, see `loss_over_halves`.

        These are the first ones of a micro-batch, and then as many of the first and of the second micro-batch. None
        afterwards, or if it cannot be told. The state of the loss stays as it is.
        """
        if self._is_done:
            return None
        tensors, spec = tree_flatten(output)
        row_bytes = sum(tensor.nbytes // max(1, len(target)) for tensor in tensors)
        num = min(len(target), _MAX_BYTES // max(1, row_bytes))
        if num == 0 or not is_by_rows(output, len(target)):
            self._is_done = True
            return None
        rows, labels = [tensor.detach()[:num].clone() for tensor in tensors], target[:num].clone()
        if self._first is None:
            self._first = rows, labels
        else:
            first, first_labels = self._first
            num = min(num, len(first_labels))
            pairs = zip((*first, first_labels), (*rows, labels), strict=True)
            *rows, labels = starmap(lambda one, other: torch.cat([one[:num], other[:num]]), pairs)
            self._first, self._is_done = None, True
        with self._ahead.running():
            if self._ahead.obstacle is not None:
                return None
            found = loss_over_halves(self._ahead.computed, tree_unflatten(rows, spec), labels)
        self._is_done = self._is_done or found is not None
        return found
