"""Finds modules whose forwards assign attributes, or may change tensors, from their code."""

import dis
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from torch import nn

from bapipe.graph.reached import reached
from bapipe.module_state.names_in_code import names_in
from bapipe.module_state.reached_state import functions_of
from bapipe.module_state.whose_code import is_of_torch, own_classes


def forward_functions(module: nn.Module) -> list[FunctionType]:
    """Returns the forward of a module's class, and the methods and properties of the class that it may call.

    Those are the ones that it names, and that these name. Functions of torch are left out.
    """
    cls = type(module)
    return reached(_defined(cls, "forward"), lambda f: [one for name in names_in(f) for one in _defined(cls, name)])


def _defined(cls: type, name: str) -> list[FunctionType]:
    """Returns the functions that a class and its bases define by a name: decorators', and those that these wrap."""
    values = (vars(base)[name] for base in own_classes(cls) if name in vars(base))
    found = (one for value in values for function in functions_of(value) or [value] for one in _with_wrapped(function))
    return [one for one in found if isinstance(one, FunctionType)]


def _with_wrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """Returns the names of functions and attributes in `forward_functions`."""
    return frozenset(name for function in forward_functions(module) for name in names_in(function))


def assigned_names(module: nn.Module) -> frozenset[str]:
    """Returns the names of the attributes that a forward of a module assigns, its own or those of other objects.

    Those are among them of which it assigns an item by a name, as of a dictionary, `self.kept["mean"] = ...`, and
    dictionaries of the module of which it assigns an item by any key.
    """
    return frozenset(name for function in forward_functions(module) for name in _assigned(function, module))


def _assigned(function: FunctionType, module: nn.Module) -> Iterator[str]:
    steps = list(dis.get_instructions(function))
    for place, step in enumerate(steps):
        if step.opname == "STORE_ATTR":
            yield str(step.argval)
        if step.opname == "STORE_SUBSCR":
            begin = _begin_of_last(steps[:place])
            owner = steps[begin - 1] if begin else None
            if owner is not None and owner.opname == "LOAD_ATTR":
                is_name = steps[begin].opname == "LOAD_CONST" and isinstance(steps[begin].argval, str)
                if is_name or isinstance(vars(module).get(owner.argval), dict):  # a tensor is never indexed by a name
                    yield str(owner.argval)


def _begin_of_last(steps: Sequence[dis.Instruction]) -> int:
    """Returns the place of the first of the last instructions that together put one value on the stack; 0 if none."""
    missing = 1
    for place in range(len(steps) - 1, -1, -1):
        step = steps[place]
        if "JUMP" in step.opname:
            return 0
        missing -= dis.stack_effect(step.opcode, step.arg)
        if missing == 0:
            return place
    return 0


def assigns_attributes(module: nn.Module) -> bool:
    """Returns whether a forward of a module assigns attributes, of the module or of another object."""
    return bool(assigned_names(module)) or "setattr" in names_in_forward(module)


def may_change_tensors(module: nn.Module) -> bool:
    """Returns whether code of a module's forward may write to tensors: by methods such as `mul_`, `+=`, or a part."""
    if any(name.endswith("_") and not name.startswith("_") for name in names_in_forward(module)):
        return True
    functions = forward_functions(module)
    named = {
        name
        for function in functions
        for names in function.__code__.co_consts
        if isinstance(names, tuple)
        for name in names
        if isinstance(name, str)
    }
    steps = (step for function in functions for step in dis.get_instructions(function))
    return not named.isdisjoint(("inplace", "out")) or any(
        step.opname == "STORE_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr.endswith("=")) for step in steps
    )


def may_be_inlined(module: nn.Module) -> bool:
    """Returns whether a module that is one layer because it has no children may have to be several.

    Its calls may depend on each other by attributes that it assigns, as in a reversible norm, which keeps statistics at
    the start of a model for its end: stages that call it in processes of their own do not see each other's attributes.
    """
    return next(module.children(), None) is None and not is_of_torch(module) and assigns_attributes(module)
