"""Modules: whose hooks they have, and how they were made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase

if TYPE_CHECKING:
    pass


__all__ = [  # torch's names
    "DropoutBase",
    "NormBase",
]


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what `torch.compile` returns."""
    return isinstance(getattr(module, "_orig_mod", None), nn.Module)


def is_scripted(module: nn.Module) -> bool:
    """Whether torch.jit has compiled a module. With PYTORCH_JIT=0 its classes are as any others."""
    from torch.jit import _state

    return isinstance(module, torch.jit.ScriptModule) and bool(_state._enabled.enabled)


def is_exported(module: nn.Module) -> bool:
    """Whether a module is what `torch.export` makes of a model: operators in one mode, which has no layers."""
    from torch.export._unlift import _StatefulGraphModule

    return isinstance(module, _StatefulGraphModule)


def forward_hooks_of(module: nn.Module) -> tuple[dict[int, Callable[..., object]], ...]:
    """Returns the hooks that a forward of a module runs, before and after it, by their numbers."""
    return module._forward_pre_hooks, module._forward_hooks


def hooks_of(module: nn.Module) -> list[Callable[..., object]]:
    """Returns the hooks that a call of a module runs, forward or backward."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for name in names for hook in getattr(module, name).values()]


def hooks_in_words(module: nn.Module) -> str | None:
    """Says whose code a module's first hook is, as other libraries register some; None if it has none."""
    hooks = hooks_of(module)
    if not hooks:
        return None
    code = hooks[0].func if isinstance(hooks[0], partial) else hooks[0]
    return f"a hook of '{getattr(code, '__module__', None) or type(code).__module__}'"


def reset_method(module: nn.Module) -> Callable[[], object] | None:
    """Returns the method that draws a module's initial parameters; some of torch's modules have it under `_`."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


@contextmanager
def without_weak_references(root: nn.Module) -> Iterator[None]:
    """Takes the weak references to their parameters from recurrent layers, and makes them anew afterwards.

    `torch.utils.swap_tensors` refuses a tensor that has weak references.
    """
    recurrent = [module for module in root.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._init_flat_weights()
