"""Whether the forward of a layer takes the arguments of a call."""

from collections.abc import Mapping, Sequence
from inspect import signature
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from bapipe.torch_private.modules import forward_hooks_of


def check_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises a TypeError, as Python does, if the forward of a module does not take these arguments.

    A layer's forward does not run while its model is traced by torch.fx, and the code that calls it may try whether it
    takes an argument. Where hooks may change the arguments, or the forward is no plain function, nothing is raised.
    """
    before, _ = forward_hooks_of(module)
    forward = module.forward
    code = forward.__func__ if isinstance(forward, MethodType) else forward
    if before or not isinstance(code, FunctionType) or hasattr(code, "__signature__"):
        return
    try:
        signature(forward, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{code.__qualname__}() {error}") from None
