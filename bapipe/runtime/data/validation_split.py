"""Data that a model is not trained on, to see how it does."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from bapipe.errors import BapipeError
from bapipe.runtime.data.buckets import forms_of
from bapipe.runtime.data.loader import num_samples
from bapipe.runtime.materialize import layer_seed

_SHARE = 10
"""One item of so many is held out of data that holds none out by itself."""


class Chosen(Dataset[Any]):
    """Some items of a data set; all else that it can do is said of the new numbers of its items."""

    def __init__(self, dataset: Dataset[Any], indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, tuple(indices)
        self.forms = forms_of(dataset)
        if hasattr(dataset, "part"):
            self.part = self._part
        if hasattr(dataset, "at_epoch"):
            self.at_epoch = self._at_epoch

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]

    def _part(self, index: int, place: int) -> Any:
        return self.dataset.part(self.indices[index], place)  # type: ignore[attr-defined]

    def _at_epoch(self, epoch: int) -> "Chosen":
        return Chosen(self.dataset.at_epoch(epoch), self.indices)  # type: ignore[attr-defined]

    def form(self, index: int) -> int:
        number: int = self.dataset.form(self.indices[index])  # type: ignore[attr-defined]
        return number

    def reference(self, index: int) -> Any:
        return self.dataset.reference(self.indices[index])  # type: ignore[attr-defined]

    def text(self, words: Sequence[int]) -> Any:
        return self.dataset.text(words)  # type: ignore[attr-defined]


def hold_out(dataset: Dataset[Any], seed: int, most: int | None) -> tuple[Dataset[Any], Dataset[Any]]:
    """Returns what to train on, and at most `most` items to evaluate on, drawn from the seed.

    The latter are from the `held_out` of the data, all of them where `most` is None; or, where it has none, `most` or
    a tenth of the data, which is then not trained on.

    Raises:
        BapipeError: nothing would be left to train on.
    """
    others: Dataset[Any] | None = getattr(dataset, "held_out", None)
    num = num_samples(dataset if others is None else others)
    size = (num if others is not None else max(1, num // _SHARE)) if most is None else min(most, num)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(layer_seed(seed, "held out"))).tolist()
    if others is not None:
        return dataset, others if size == num else Chosen(others, sorted(order[:size]))
    if size == num:
        raise BapipeError(
            f"the data has {num} samples, and evaluation takes {size} of them away: give more data, or a smaller "
            "--eval-samples"
        )
    return Chosen(dataset, sorted(order[size:])), Chosen(dataset, sorted(order[:size]))
