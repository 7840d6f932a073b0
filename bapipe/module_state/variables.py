"""The variables outside of a function that its code may read, and the defaults of its arguments, as they are now."""

from types import FunctionType

from bapipe.module_state.names_in_code import names_in


def globals_of(function: FunctionType) -> dict[str, object]:
    """Returns the values of those names in the code that are global variables, by name."""
    scope = function.__globals__
    return {name: scope[name] for name in names_in(function) if name in scope}


def closure_of(function: FunctionType) -> dict[str, object]:
    """Returns the values of the variables around a function, by name, without those that have none yet."""
    found: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def defaults_of(function: FunctionType) -> dict[str, object]:
    """Returns the defaults of the arguments, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
