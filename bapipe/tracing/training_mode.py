"""The mode in which a model trains."""

from torch import nn


def enter_training_mode(module: nn.Module) -> None:
    """Puts a module in training mode, if it is in evaluation mode as a whole, in which libraries give loaded models.

    Parts of a module in training mode that are in evaluation mode stay so, such as frozen batch norms.
    """
    if not module.training:
        module.train()
