"""Calls that only a tensor with values understands, and that a graph keeps as they are: functions with a backward of
their own, and hooks on tensors.

A tracer that looked into them would lose what they do in the backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from bapipe.torch_private.autograd_functions import Function, applies_intercepted, apply_function
from bapipe.tracing.reasons import Reason

DRAWS_IN_PYTHON = Reason(
    "its forward draws random numbers in Python",
    "draw by torch, such as `torch.rand`, or put the draw into a module of its own",
)
"""Why a graph cannot keep a forward that reads the generators of Python or numpy: what it drew is not in the graph."""

ASSIGNS_DATA = Reason(
    "its forward assigns `data` of a tensor, which no graph can hold: write to it in place, as by `copy_`", to_cut=""
)


def assigns_data(func: Any) -> bool:
    """Returns whether a function of torch is the assignment to `data` of a tensor."""
    return getattr(func, "__name__", "") == "__set__" and getattr(func.__self__, "__name__", "") == "data"


class CannotKeep(Exception):
    """A call inside the modules at some paths that a graph cannot keep, so that these must be one layer each."""

    def __init__(self, reasons: dict[str, Reason]) -> None:
        """`reasons` says for each path why; the empty path is the model itself."""
        super().__init__(str(next(iter(reasons.values()))))
        self.reasons = reasons


@contextmanager
def functions_intercepted(apply: Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """In this context `apply` is called in place of the `apply` of every `torch.autograd.Function`.

    The function of torch's re-entrant checkpointing is not one of them: it calls what it was given, as if there were no
    checkpointing. Whether to recompute a stage is for the plan to say.
    """

    def intercepted(cls: Function, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run, _, *arguments = args
            return run(*arguments)
        return apply(cls, args, kwargs)

    with applies_intercepted(intercepted):
        yield


@cache
def function_operator(cls: Function) -> Callable[..., Any]:
    """Returns a plain function that applies an autograd function: torch.fx graphs can call plain functions only."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return apply_function(cls, args, kwargs)

    apply.__name__ = apply.__qualname__ = cls.__name__
    vars(apply)["autograd_function"] = cls
    return apply


def is_function_operator(target: object) -> bool:
    """Returns whether the target of a node applies an autograd function."""
    return hasattr(target, "autograd_function")


def is_looked_into(cls: Function) -> bool:
    """Returns whether a graph has what an autograd function runs in its place: it is of torch, and has that gradient.

    Functions of torch's distributions have gradients of their own.
    """
    return cls.__module__.startswith("torch.") and not cls.__module__.startswith("torch.distributions.")


def hook_operator(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], None]:
    """Returns a plain function that registers a hook on a tensor; without a gradient there is none to register."""

    def register_hook(tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    vars(register_hook)["registers_hook"] = True
    return register_hook


def registers_hook(target: object) -> bool:
    """Returns whether the target of a node registers a hook, so that the node matters although nothing uses it."""
    return hasattr(target, "registers_hook")


@contextmanager
def functions_refused() -> Iterator[None]:
    """In this context an autograd function, or a hook on a tensor, raises `CannotKeep`, but those looked into run."""

    def refuse(cls: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_looked_into(cls):
            return apply_function(cls, args, kwargs)
        raise CannotKeep({"": Reason(f"its forward applies the autograd function {cls.__name__}")})

    def refuse_hook(tensor: Tensor, hook: object) -> None:
        raise CannotKeep({"": Reason("its forward registers a hook on a tensor")})

    with functions_intercepted(refuse), patch.object(Tensor, "register_hook", refuse_hook):
        yield
