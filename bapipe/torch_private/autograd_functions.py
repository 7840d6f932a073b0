"""Calls of `torch.autograd.Function`s, which may be intercepted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.function import _SingleLevelFunction

Function = type[torch.autograd.Function]

_APPLY = torch.autograd.Function.__dict__["apply"].__func__

_LETS_THROUGH = ContextVar("_LETS_THROUGH", default=False)
"""Whether the next call is one by `apply_function`."""


@contextmanager
def applies_intercepted(apply: Callable[..., Any]) -> Iterator[None]:
    """In this context `apply(cls, *args, **kwargs)` is called in place of the `apply` of every autograd function.

    Code may have taken a method `apply` from its class before, as in `scan = Scan.apply`. That is torch's own, which
    looks for the next `apply` in a base class: there, one is put in between.
    """

    def next_apply(cls: Function, *args: Any, **kwargs: Any) -> Any:
        if not _LETS_THROUGH.get():
            return apply(cls, *args, **kwargs)
        _LETS_THROUGH.set(False)  # what the forward of this function applies in turn is intercepted
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]

    with (
        patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        patch.object(_SingleLevelFunction, "apply", classmethod(next_apply), create=True),
    ):
        yield


def apply_function(cls: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function as its own `apply` does, wherever that is intercepted."""
    token = _LETS_THROUGH.set(True)
    try:
        return _APPLY(cls, *args, **kwargs)
    finally:
        _LETS_THROUGH.reset(token)
