"""Which modules are torch's own."""

from torch import nn

from bapipe.torch_private.modules import hooks_of


def written_class(module: nn.Module) -> type:
    """Returns the class of a module as it was written: of a parametrized module, torch has made another one of it."""
    return next(kind for kind in type(module).__mro__ if kind.__module__ != "torch.nn.utils.parametrize")


def is_of_torch(module: nn.Module) -> bool:
    """Returns whether a module's class is one of torch.nn."""
    return written_class(module).__module__.startswith("torch.nn.")


def calls_other_code(module: nn.Module) -> bool:
    """Returns whether a call of a module runs code from outside torch.nn: its own, or that of a hook."""
    return not is_of_torch(module) or "forward" in vars(module) or bool(hooks_of(module))
