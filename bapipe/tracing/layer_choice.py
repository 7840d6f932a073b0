"""Which calls of modules are layers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from bapipe.module_state.whose_code import is_of_torch

_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """Which calls of modules are layers: of those of torch.nn, of those without children, and of leaf modules.

    Attributes:
        leaf_modules: paths of modules to take as one layer each.
        inlined: paths of modules without children whose operators are captured instead, unless they are leaf modules.
    """

    leaf_modules: frozenset[str] = frozenset()
    inlined: frozenset[str] = frozenset()

    def is_layer(self, module: nn.Module, path: str) -> bool:
        """Returns whether a call of a module is one layer."""
        if path in self.leaf_modules:
            return True
        if path in self.inlined:
            return False
        if is_of_torch(module) and not isinstance(module, _CONTAINERS):
            return True
        return next(module.children(), None) is None

    def with_leaves(self, paths: Iterable[str]) -> "LayerChoice":
        """Returns the choice with further leaf modules."""
        return replace(self, leaf_modules=self.leaf_modules.union(paths))
