"""Training mode and evaluation mode of modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


def enter_training_mode(module: nn.Module) -> None:
    """Puts a module in training mode, if it is in evaluation mode as a whole, in which libraries give loaded models.

    Parts of a module in training mode that are in evaluation mode stay so, such as frozen batch norms.
    """
    if not module.training:
        module.train()


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
