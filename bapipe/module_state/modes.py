"""Training mode and evaluation mode of modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from torch import nn

from bapipe.torch_private.modules import DropoutBase


def enter_training_mode(module: nn.Module) -> None:
    """Puts a module in training mode if all of it is in evaluation mode, in which libraries give loaded models.

    If parts of it are in training mode, each part stays in its own: frozen batch norms, or a body under a new head.
    """
    if is_evaluating(module):
        module.train()


def is_evaluating(module: nn.Module) -> bool:
    """Returns whether all of a module is in evaluation mode, but for parts of which the mode says nothing.

    Such parts, as a loss that is added to a loaded model, are in training mode when they are made.
    """
    return not any(part.training and _has_mode(part) for part in module.modules()) and not module.training


def _has_mode(part: nn.Module) -> bool:
    has_state = next(chain(part.parameters(recurse=False), part.buffers(recurse=False)), None) is not None
    return has_state or isinstance(part, DropoutBase)


def idle_dropout(module: nn.Module) -> str | None:
    """Says of a module in training mode which part, of those to train, has dropout but is in evaluation mode.

    Libraries give loaded models so, and a model that has one as a part is in training mode itself. None if there is no
    such part.
    """
    for name, part in module.named_modules():
        has_dropout = any(isinstance(inner, DropoutBase) and inner.p > 0 for inner in part.modules())
        if not part.training and has_dropout and any(p.requires_grad for p in part.parameters()):
            owner = f"'{name}'" if name else "the model"
            return (
                f"{owner} is in evaluation mode, so its dropout does nothing while it trains: call train() of the "
                "model after it is loaded"
            )
    return None


@contextmanager
def evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts modules and all their submodules in evaluation mode; afterwards each has the mode that it had."""
    before = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in before:  # not eval(): a model may override it
        part.training = False
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
