"""Marks parameters and buffers whose values are on another rank, and refuses operations that need the values.

They are on the meta device. In-place operations of torch silently treat such tensors as zeros: an average of weights
that adds them up would decay to zero, and a file of all weights would lack them. So operations that mix them with
tensors that have values, or store them, raise an error. Names, shapes and types may be read, and values copied into
them are dropped, as when all ranks load one file of weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError
from bapipe.torch_private.tensors import FakeTensor, tree_flatten, without_tensor_classes

_NAME = "_bapipe_name"


class _OnAnotherRank(Tensor):
    """The class of marked buffers, and of results that are computed from marked tensors alone."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with without_tensor_classes():
            leaves, _ = tree_flatten((tuple(args), dict(kwargs or {})))
            own = [leaf for leaf in leaves if isinstance(leaf, _OnAnotherRank)]
            others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, _OnAnotherRank)]
            is_copied_into = function is Tensor.copy_ and args[0] is own[0]  # as by `load_state_dict`: nothing to keep
            has_values = any(not other.is_meta and not isinstance(other, FakeTensor) for other in others)
            if has_values and not is_copied_into:
                _refuse(own[0])
            result = function(*args, **(kwargs or {}))
            if type(result) is Tensor and result.is_meta and not others:
                result.__class__ = _OnAnotherRank
                setattr(result, _NAME, getattr(own[0], _NAME, None))
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with without_tensor_classes():
            copied = torch.empty_like(self, requires_grad=self.requires_grad)
        copied.__class__ = type(self)
        vars(copied).update(vars(self))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self)


class _ParameterOnAnotherRank(_OnAnotherRank, nn.Parameter):
    pass


def mark_as_on_another_rank(tensor: Tensor, name: str) -> None:
    """Marks a tensor on the meta device: uses of its values raise an error with `name`, its name in the model."""
    setattr(tensor, _NAME, name)
    if type(tensor) is nn.Parameter:
        tensor.__class__ = _ParameterOnAnotherRank
    elif type(tensor) is Tensor:
        tensor.__class__ = _OnAnotherRank


def is_on_another_rank(tensor: Tensor) -> bool:
    """Returns whether a tensor was marked."""
    return hasattr(tensor, _NAME)


def _refuse(tensor: Tensor) -> NoReturn:
    raise BapipeError(
        f"the values of '{getattr(tensor, _NAME)}' are on another rank of the pipeline: use "
        "`pipeline.named_parameters()` and `pipeline.state_dict()`, which hold those of this rank's stages, and gather "
        "them from all ranks where all are needed"
    )
