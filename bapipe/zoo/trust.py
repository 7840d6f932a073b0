"""Which factory and which data that a file names are used: code that is imported runs, and data may be private.

A plan or a checkpoint may come from someone else. Its factory is one of the zoo's, or a function of a module in the
current folder, or the user has named it. Its data has a name, or lies in the current folder, or the user has named it.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from bapipe.errors import InvalidModel
from bapipe.module_path import current_folder_importable
from bapipe.zoo import ZOO
from bapipe.zoo.data.translation import LOCALE
from bapipe.zoo.factory import find

_HUGGING_FACE = "bapipe.zoo.hugging_face"

_ZOO_MODULES = frozenset(path.partition(":")[0] for path in ZOO.values())


def check_trusted(factory: str, trusted: str | None) -> None:
    """Raises InvalidModel if a plan's factory is neither the trusted one nor, without one, known to be harmless."""
    if trusted is not None and factory != trusted:
        raise InvalidModel(
            f"`trust_factory` {trusted} is not the plan's factory, which is '{factory}': leave it out, or name that "
            "one if you trust the plan"
        )
    if factory == trusted or is_of_zoo(factory):
        return
    with current_folder_importable():
        if _is_own(factory.partition(":")[0]):
            # A module's names include those that it imports, such as another's functions.
            defined_in = _module_of(find(factory, "factory"))
            if defined_in in _ZOO_MODULES or _is_own(defined_in):
                return
    raise InvalidModel(
        f"the plan's factory '{factory}' is neither of the zoo nor a function of a module in the current folder, and "
        f"calling it may do anything: if you trust the plan, `trust_factory` {factory}"
    )


def is_of_zoo(factory: str) -> bool:
    """Returns whether a factory is one of the zoo's models, or builds a class of transformers."""
    module, _, name = factory.partition(":")
    return factory in ZOO.values() or (module == _HUGGING_FACE and name.isidentifier() and not name.startswith("_"))


def why_untrusted(data: str) -> str | None:
    """Returns why data that a file names may not be opened unless the user names it too; None if it may.

    It may if it is a name, such as mnist, or in the current folder, links followed. A function, `module.path:function`,
    may not be called, wherever it is.
    """
    if ":" in data and not data.startswith(LOCALE):
        return "calling a function that a file names may do anything"
    is_path = "\0" not in data
    if is_path and Path(os.path.realpath(os.path.expanduser(data))).is_relative_to(os.path.realpath(os.getcwd())):
        return None
    return "of the paths that a file names only those in the current folder are opened"


def _module_of(function: Callable[..., object]) -> str:
    """Returns the module that defines a function."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _is_own(module: str) -> bool:
    """Returns whether a module is a file in the current folder, or lies in a package that is a folder there.

    Nothing is imported. A module of that name that is installed, or imported already from elsewhere, is none.
    """
    top = module.partition(".")[0]
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # such as `__main__`, which has no spec
        return False
    if spec is None:
        return True  # there is nothing to import, which `find` then says
    here = Path(os.getcwd()).resolve()
    if spec.submodule_search_locations is not None:
        return [Path(place).resolve() for place in spec.submodule_search_locations] == [here / top]
    # Modules that come with Python have an origin that is no file.
    return spec.has_location and spec.origin is not None and Path(spec.origin).resolve().parent == here
