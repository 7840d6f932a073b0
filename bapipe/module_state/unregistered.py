"""Finds parameters of a module that torch does not see, because a list or a dictionary holds them."""

from collections.abc import Iterator, Mapping

from torch import nn


def unregistered_parameters(module: nn.Module) -> str | None:
    """Says which attribute holds parameters to train that are none of the module's; None if there is none.

    Torch finds those of attributes, of `nn.ModuleList` and of `nn.ModuleDict`, and not those of plain containers: they
    are not trained, saved or moved. Frozen ones may be left out on purpose, such as a loaded network that a loss uses.
    """
    known = {id(parameter) for parameter in module.parameters()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if any(p.requires_grad and id(p) not in known for p in _parameters_in(value)):
                owner, kind = f"{path}.{name}" if path else name, type(value).__name__
                return (
                    f"the {kind} '{owner}' holds parameters that are none of the model's, so they are not trained: "
                    "torch sees those of nn.ModuleList, nn.ModuleDict, nn.ParameterList and nn.ParameterDict"
                )
    return None


def _parameters_in(value: object) -> Iterator[nn.Parameter]:
    held = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for one in held:
        if isinstance(one, nn.Module):
            yield from one.parameters()
        elif isinstance(one, nn.Parameter):
            yield one
