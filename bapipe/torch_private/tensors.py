"""Operators and tensors: what torch notes of them, and the tensors without values that it traces with."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as without_fake_tensors
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    pass

from bapipe.torch_private.measuring import without_log

__all__ = [  # torch's names
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TreeSpec",
    "is_functorch_wrapped",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "without_fake_tensors",
]


def tree_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors among the leaves of a nested value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def argument_schemas(operator: OpOverload) -> Sequence[Any]:
    """Returns the arguments in an operator's schema, with what they alias and whether they are written."""
    arguments: Sequence[Any] = operator._schema.arguments
    return arguments


def aten_overloads(name: str) -> list[OpOverload]:
    """Returns the operators of torch behind a function or method of this name; none if there is no such one."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]  # type: ignore[no-untyped-call]


def return_schemas(operator: OpOverload) -> Sequence[Any]:
    """Returns the results in an operator's schema, with what they alias."""
    returns: Sequence[Any] = operator._schema.returns
    return returns


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of another one, for autograd."""
    return tensor._is_view()


def storage_key(tensor: Tensor) -> int:
    """Returns a number that tensors have in common which share memory, also on the meta device, while one is alive."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # of layouts without a storage, such as sparse ones
        return id(tensor)
    return key


def version(tensor: Tensor) -> int:
    """Returns how often a tensor's memory was written to; 0 if torch does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def address(tensor: Tensor) -> int:
    """Returns where the values of a dense tensor lie in memory; 0 if it has none there, as on the meta device."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not is_dense or isinstance(tensor, FakeTensor):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a class that consists of other tensors, or one within a transform of torch.func
        return 0


def version_kept(tensor: Tensor) -> AbstractContextManager[object]:
    """In this context torch does not count writes to a tensor."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def give_storage(tensor: Tensor, value: Tensor) -> None:
    """Gives a tensor the storage of another one, which is lost; its class, attributes and hooks stay.

    All references to the tensor, such as tied weights, see the new storage.

    Raises:
        RuntimeError: something outside of Python, such as an autograd graph or a scripted module, holds the tensor.
    """
    value.__class__ = type(tensor)
    vars(value).update(vars(tensor))
    torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
    # Autograd has noted the hooks beside the storage, which are now the other tensor's: assigning notes them anew.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks, None) is not None:
            setattr(tensor, hooks, getattr(tensor, hooks))


def parameter_hooks(parameter: nn.Parameter) -> list[Callable[..., object]]:
    """The hooks on a parameter's gradient, before and after it is accumulated."""
    return [*(parameter._backward_hooks or {}).values(), *hooks_behind_gradient(parameter)]


def hooks_behind_gradient(parameter: nn.Parameter) -> list[Callable[..., object]]:
    """The hooks on a parameter's gradient that are called once it is accumulated, with the parameter."""
    return [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()]


def needs_values(error: Exception) -> bool:
    """Whether an operator raised an error because its arguments are fake tensors, which have no values."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


_MAX_CACHED_OPERATORS = 10_000
"""Operators on fake tensors that torch may remember, at 1 to 3 KB each."""


def limit_fake_tensor_cache() -> None:
    """Lets torch forget operators on fake tensors if it remembers many: it never does, and numbers make them differ."""
    if FakeTensorMode.cache_info().size > _MAX_CACHED_OPERATORS:
        FakeTensorMode.cache_clear()


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keeps torch from writing tracebacks of errors that are dealt with, and that a recurrent layer must be a bug."""
    with without_log("torch._subclasses.fake_tensor"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


@contextmanager
def distributions_unvalidated() -> Iterator[None]:
    """In this context torch's distributions do not validate their arguments, which takes values, unless told to."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def without_tensor_classes() -> AbstractContextManager[object]:
    """In this context subclasses of tensors behave as tensors do."""
    return torch._C.DisableTorchFunctionSubclass()


def is_in_transform() -> bool:
    """Returns whether this runs in a function that `torch.func` transforms, such as by `vmap`."""
    return torch._C._functorch.maybe_current_level() is not None


def autograd_mode() -> tuple[bool, object]:
    """Returns whether gradients are computed, and what tensors that autograd saves are replaced by.

    Functions that a backward runs again are in another mode than what is around them.
    """
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(False)
