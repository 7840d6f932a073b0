"""Which modules without children to inline, so that their calls may be in different stages.

Such a module is one layer, and each of its calls is run as it is. If a call reads attributes that another one has
assigned, as in a reversible norm, a stage with one of the calls does not see them. In a graph of the module's operators
what was an attribute is a tensor like others, which stages send each other.
"""

from collections.abc import Collection

from torch import nn

from bapipe.module_state.assigned_attributes import assigned_names, may_be_inlined, names_in_forward
from bapipe.tracing.model import TracedModel


def inlinable(model: TracedModel, path: str, tried: Collection[str]) -> frozenset[str]:
    """Returns layers' modules to inline because the split model differs in code of the module at `path`.

    These are the modules that may have left it values in attributes, with others of their classes.
    """
    layers = {layer.name.partition("#")[0] for layer in model.layers}.difference(tried)
    modules = {other: part for other, part in model.root.named_modules() if other in layers and may_be_inlined(part)}
    kinds = {type(modules[other]) for other in _leaving_values(model.root, path, modules)}
    return frozenset(other for other, part in modules.items() if type(part) in kinds)


def inlined_in_vain(root: nn.Module, path: str, inlined: frozenset[str]) -> frozenset[str]:
    """Returns the inlined modules that may be the cause why the split model differs in code of the module at `path`.

    It may be the code of another one around them, because their operators are in layers of the modules beside them.
    """
    inside = {other for other in inlined if not path or other.startswith(f"{path}.")}
    return _leaving_values(root, path, inlined) | inside


def _leaving_values(root: nn.Module, path: str, modules: Collection[str]) -> frozenset[str]:
    """Returns which modules leave values in attributes whose names the code of the module at a path has.

    The module itself is among them: its next call may read them.
    """
    names = names_in_forward(root.get_submodule(path))
    return frozenset(other for other in modules if other == path or names & assigned_names(root.get_submodule(other)))
