"""The variables outside of a function that its code may read, and the defaults of its arguments, as they are now."""

from contextlib import suppress
from types import CellType, FunctionType

from bapipe.module_state.names_in_code import names_in


def globals_of(function: FunctionType) -> dict[str, object]:
    """Returns the values of those names in the code that are global variables, by name."""
    scope = function.__globals__
    return {name: scope[name] for name in names_in(function) if name in scope}


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """Returns the cells of those variables around a function that have a value, by name."""
    found: dict[str, CellType] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            _ = cell.cell_contents
            found[name] = cell
    return found


def closure_of(function: FunctionType) -> dict[str, object]:
    """Returns the values of the variables around a function, by name, without those that have none yet."""
    return {name: cell.cell_contents for name, cell in cells_of(function).items()}


def defaults_of(function: FunctionType) -> dict[str, object]:
    """Returns the defaults of the arguments, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
