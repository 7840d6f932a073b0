"""Mini-batches of items of like sizes, for data whose items come in several forms, from the smallest to the largest."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

Form = tuple[tuple[int, ...], ...]
"""The shape of each part of an item: of the inputs, then of the target."""


def forms_of(dataset: Dataset[Any]) -> tuple[Form, ...]:
    """Returns the forms of the items of data, smallest first; the last is what the model is planned for. Or none."""
    forms: tuple[Form, ...] = getattr(dataset, "forms", ())
    return forms


def form_at(dataset: Dataset[Any], chosen: Sequence[int]) -> int | None:
    """Returns the number of the smallest form that holds some items; None where it is the one planned for."""
    forms = forms_of(dataset)
    number = max((dataset.form(index) for index in chosen), default=0) if forms else 0  # type: ignore[attr-defined]
    return number if number + 1 < len(forms) else None


def examples_in(inputs: Sequence[Tensor], form: Form) -> tuple[Tensor, ...]:
    """Returns examples of a model's inputs with the shapes of a form."""
    shapes = form[: len(inputs)]
    return tuple(example.new_zeros((example.shape[0], *shape)) for example, shape in zip(inputs, shapes, strict=True))


def cut(batch: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a batch without what lies beyond the shape of its items."""
    return batch[(slice(None), *(slice(size) for size in shape))].contiguous()


def alike(numbers: Sequence[int], order: Sequence[int], size: int, generator: torch.Generator) -> list[int]:
    """Returns items in an order in which mini-batches, one after another, are of like sizes, and themselves in any.

    `numbers` are the forms of the items, `order` any order of them. What does not fill a mini-batch of one form goes
    on to the next larger one, so that no more is left out than without forms.
    """
    batches: list[list[int]] = []
    left: list[int] = []
    for form in sorted(set(numbers)):
        left += [index for index in order if numbers[index] == form]
        whole = len(left) // size * size
        batches += [left[start : start + size] for start in range(0, whole, size)]
        left = left[whole:]
    places = torch.randperm(len(batches), generator=generator).tolist()
    return [index for place in places for index in batches[place]] + left
