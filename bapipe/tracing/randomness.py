"""Finds the operators of a graph that draw random numbers, by torch's own tag of its operators."""

from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from bapipe.graph.reached import reached
from bapipe.module_state.names_in_code import names_in
from bapipe.module_state.variables import closure_of
from bapipe.module_state.whose_code import calls_other_code, top_package
from bapipe.torch_private.tensors import OpOverload, aten_overloads
from bapipe.tracing.kept_calls import is_function_operator


def is_random(module: fx.GraphModule, node: fx.Node) -> bool:
    """Returns whether an operator may draw random numbers; what is from outside torch counts as random."""
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return any(calls_other_code(part) or _module_is_random(part) for part in called.modules())
    if node.op not in ("call_function", "call_method"):
        return False
    if is_function_operator(node.target):
        return True  # nobody can say
    if isinstance(node.target, OpOverload):
        return _is_tagged(node.target)
    if node.op == "call_method":
        return _is_random_operator(str(node.target)) or draws_random_numbers(getattr(Tensor, str(node.target), None))
    return draws_random_numbers(node.target)


def runs_other_code(module: fx.GraphModule, node: fx.Node) -> bool:
    """Returns whether an operator runs code from outside torch, which may draw from generators of Python and numpy."""
    if node.op == "call_module":
        return any(map(calls_other_code, module.get_submodule(str(node.target)).modules()))
    if is_function_operator(node.target):
        return True
    return isinstance(node.target, FunctionType) and top_package(node.target) not in ("bapipe", "torch")


def draws_random_numbers(function: Any) -> bool:
    """Returns whether a function may draw random numbers: it is an operator of torch that does, or its code, or that of
    functions of torch that it calls, names one.
    """
    if getattr(function, "__closure__", None):
        return _finds_random_operator(function)  # not cached: it may hold a model, as a hook does
    return _cached(function)


def _finds_random_operator(function: Any) -> bool:
    if _is_random_operator(getattr(function, "__name__", "")):
        return True
    return any(_is_random_operator(name) for called in reached([function], _called) for name in names_in(called))


_cached = cache(_finds_random_operator)


@cache
def _is_random_operator(name: str) -> bool:
    return any(map(_is_tagged, aten_overloads(name)))


def _is_tagged(overload: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in overload.tags


def _called(function: Any) -> list[Any]:
    """Returns the functions of torch that a function written in Python may call."""
    if not isinstance(function, FunctionType):
        return []
    found = [function.__globals__.get(name) for name in names_in(function)]
    found += [getattr(functional, name, None) for name in names_in(function)]
    found += closure_of(function).values()
    return [called for called in found if isinstance(called, FunctionType) and top_package(called) == "torch"]


def _module_is_random(module: nn.Module) -> bool:
    dropout = getattr(module, "dropout", None)
    return dropout > 0 if isinstance(dropout, float) else draws_random_numbers(type(module).forward)
