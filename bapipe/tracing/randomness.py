"""Finds the operators of a graph that draw random numbers."""

import re

import torch
from torch import fx, nn

from bapipe.torch_private import DropoutBase, OpOverload
from bapipe.tracing.kept_calls import is_function_operator

_NAMES = re.compile(
    "drop|rand|bernoulli|multinomial|binomial|poisson|(^|_)normal(_|$)|uniform|exponential|cauchy|geometric|_standard_gamma"
    "|dirichlet|gumbel|fractional|rrelu|lstm|gru|rnn|attention"
)
"""Names of functions and methods: what torch calls has a tag ("nondeterministic_seeded"), its callers have none."""

_RANDOM_MODULES = DropoutBase | nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d


def is_random(module: fx.GraphModule, node: fx.Node) -> bool:
    """Returns whether an operator may draw random numbers; what is from outside torch counts as random."""
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return any(_module_is_random(part) for part in called.modules())
    if node.op not in ("call_function", "call_method"):
        return False
    if is_function_operator(node.target):
        return True  # nobody can say
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return True
    return has_random_name(getattr(node.target, "__name__", str(node.target)))


def has_random_name(name: str) -> bool:
    """Returns whether a function's name says that it may draw random numbers."""
    return bool(_NAMES.search(name))


def _module_is_random(module: nn.Module) -> bool:
    if not type(module).__module__.startswith("torch.nn."):
        return True
    dropout = getattr(module, "dropout", 0.0)
    return isinstance(module, _RANDOM_MODULES) or (isinstance(dropout, float) and dropout > 0)
