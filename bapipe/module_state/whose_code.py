"""Whose code functions, classes and modules are: torch's, that of other libraries, or the user's."""

import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from torch import nn

from bapipe.torch_private.modules import hooks_of


def top_package(code: object) -> str:
    """Returns the first part of the name of the Python module that code is in; empty if that is not known.

    `code` is a function, a class, an object, which is in the module of its class, or a Python module itself.
    """
    return _module_name(code).partition(".")[0]


def is_of_a_library(code: object) -> bool:
    """Returns whether code is torch's, bapipe's or Python's own."""
    return is_package_of_a_library(top_package(code))


def is_package_of_a_library(package: str) -> bool:
    """Returns whether a package, by its name, is torch, bapipe or Python's own."""
    return package in ("torch", "bapipe") or package in sys.stdlib_module_names


def is_of_the_user(code: object) -> bool:
    """Returns whether code is neither that of a library nor of a package that pip has installed.

    Those are in a folder of another name for Debian's Python.
    """
    if is_of_a_library(code):
        return False
    return not _is_installed(getattr(sys.modules.get(_module_name(code)), "__file__", None) or "")


def own_classes(kind: type) -> list[type]:
    """Returns a class of modules and its bases, without those of torch and Python; bapipe has models in its zoo."""
    return [cls for cls in kind.__mro__ if top_package(cls) not in ("builtins", "torch")]


def written_class(module: nn.Module) -> type:
    """Returns the class of a module as it was written: of a parametrized module, torch has made another one of it."""
    return next(kind for kind in type(module).__mro__ if kind.__module__ != "torch.nn.utils.parametrize")


def is_of_torch(module: nn.Module) -> bool:
    """Returns whether a module's class is one of torch.nn."""
    return written_class(module).__module__.startswith("torch.nn.")


def calls_other_code(module: nn.Module) -> bool:
    """Returns whether a call of a module runs code from outside torch.nn: its own, or that of a hook."""
    return not is_of_torch(module) or "forward" in vars(module) or bool(hooks_of(module))


@cache  # taking a path apart takes ten times as long as all else here, and code asks for the same few files
def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _module_name(code: object) -> str:
    name = code.__name__ if isinstance(code, ModuleType) else getattr(code, "__module__", None)
    return str(name or "")
