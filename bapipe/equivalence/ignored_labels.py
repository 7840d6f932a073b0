"""Labels that a loss may ignore, such as those of padding: what its code names, and what stands out among targets.

Whether it does is not known of them: losses are computed of batches in which one sample has such labels alone.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType

import torch
from torch import Tensor, nn

from bapipe.module_state.names_in_code import names_in, numbers_compared_in, numbers_in
from bapipe.module_state.reached_state import KeptState
from bapipe.module_state.variables import closure_of, defaults_of, globals_of
from bapipe.module_state.whose_code import is_of_the_user

IGNORED_BY_TORCH = -100
"""What torch's cross entropy ignores by default."""

_ATTRIBUTE = re.compile(r"(ignored?|pad(ding)?)_?(index|idx|id|label|value|token|token_id)|ignored?|pad", re.IGNORECASE)
"""Names of attributes that say which label is ignored, as `ignore_index`, `padding_idx` and `pad_token_id` do."""

_VARIABLE = re.compile(r"ignore|pad", re.IGNORECASE)
"""What such names of variables and arguments contain."""

_MAX_LABELS = 16
"""Of those that code names; for each, a loss is computed five times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLabels:
    """Whole numbers in the code of a loss, and in what it reaches.

    Attributes:
        ignored: those that are named so, or compared with something: labels of any kind.
        others: all others, which may be dimensions or sizes.
    """

    ignored: tuple[int, ...]
    others: tuple[int, ...]

    def that_may_be_among(self, labels: Tensor) -> list[int]:
        """Returns those that may be labels: of others those in the range of classes, as not all code checks labels."""
        largest = int(labels.max())
        found = dict.fromkeys([*self.ignored, *(one for one in self.others if 0 <= one <= largest)])
        return list(found)[:_MAX_LABELS]


def labels_in_code(state: KeptState) -> CodeLabels:
    """Returns the labels in what a loss reaches, and in a model that is known to the state.

    Of modules these are attributes, and what forwards are given that name a loss.
    """
    ignored: list[object] = []
    others: list[object] = []
    for one in list(state.followed.values()):
        if isinstance(one, partial):
            ignored += one.keywords.values()
        elif isinstance(one, nn.Module):
            ignored += (value for name, value in vars(one).items() if _ATTRIBUTE.fullmatch(name))
        function = type(one).forward if isinstance(one, nn.Module) else one
        is_of_loss = one is function or any("loss" in name or "entropy" in name for name in names_in(function))
        if isinstance(function, FunctionType) and is_of_loss and is_of_the_user(function):
            variables = [one for values in (globals_of, defaults_of, closure_of) for one in values(function).items()]
            ignored += [value for name, value in variables if _VARIABLE.search(name)] + numbers_compared_in(function)
            others += [value for _, value in variables] + numbers_in(function)
    return CodeLabels(ignored=_numbers(ignored), others=_numbers(others))


def _numbers(values: Iterable[object]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(one for one in values if type(one) is int))


def labels_that_stand_out(labels: Tensor) -> list[int]:
    """Returns the least, the greatest and the most frequent label, in all and where sequences begin and end."""
    parts = [labels] if labels.dim() < 2 else [labels, labels[..., 0], labels[..., -1]]
    return [int(labels.min()), int(labels.max()), *(int(part.flatten().mode().values) for part in parts)]


def holds_labels(tensor: Tensor) -> bool:
    """Returns whether a tensor may hold labels: whole numbers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool) and tensor.numel() > 0


def with_label(tensor: Tensor, values: Iterable[int]) -> Iterator[tuple[Tensor, int, bool]]:
    """Yields a tensor with each of some values in its first row, that value, and whether the tensor has held it.

    On a GPU only columns that hold it get it: a kernel that refuses an index ends all use of the GPU by this process.
    """
    limits = torch.iinfo(tensor.dtype)
    for value in dict.fromkeys(values):
        if not limits.min <= value <= limits.max:
            continue
        held = (tensor == value).any(0)
        is_held = bool(held.any())
        if tensor.device.type == "cpu" or is_held:
            other = tensor.clone()
            other[0] = value if tensor.device.type == "cpu" else tensor[0].masked_fill(held, value)
            yield other, value, is_held
