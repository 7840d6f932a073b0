"""Finds a factory by its name, and calls it."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from traceback import extract_tb

from bapipe.errors import BapipeError, InvalidModel, did_you_mean
from bapipe.module_path import current_folder_importable
from bapipe.zoo import is_function_path
from bapipe.zoo.example import Example

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of bapipe."""

Factory = str | Callable[..., object]
"""A function that returns an `Example`, or its name as `module.path:function`."""


def build(factory: Factory, arguments: Mapping[str, object]) -> Example:
    """Returns the Example that a factory makes; the current folder is also searched for the module of a name.

    Raises:
        InvalidModel: no such module or function, arguments it does not take, an error inside it, or another result
            than an Example.
    """
    with current_folder_importable():
        function = find(factory, "factory") if isinstance(factory, str) else factory
        name = factory_name(factory)
        _check_arguments(name, function, arguments)
        try:
            example = function(**arguments)
        except BapipeError:
            raise
        except Exception as error:  # any error in the factory's code
            raise InvalidModel(f"factory '{name}' failed: {with_place(error)}") from error
    if not isinstance(example, Example):
        raise InvalidModel(
            f"factory '{name}' returned a {type(example).__name__}; want a bapipe.Example with the "
            "module, example inputs, a target and the loss"
        )
    return example


def factory_name(factory: Factory) -> str:
    """Returns the name of a factory, as `module.path:function`."""
    if isinstance(factory, str):
        return factory
    function = factory.func if isinstance(factory, partial) else factory
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"


def importable_name(factory: Factory) -> str | None:
    """Returns the name by which another process can import a factory; None of one that only this process knows."""
    name = factory_name(factory)
    if isinstance(factory, str):
        return name
    path, _, function = name.partition(":")
    is_there = path != "__main__" and getattr(sys.modules.get(path), function, None) is factory
    return name if is_there and is_function_path(name) else None


def find(function_path: str, what: str) -> Callable[..., object]:
    """Returns the function at `module.path:function`; `what` is its name in messages."""
    path, _, name = function_path.partition(":")
    try:
        module = importlib.import_module(path)
    except Exception as error:  # importing runs the module's own code
        if isinstance(error, ModuleNotFoundError) and error.name and f"{path}.".startswith(f"{error.name}."):
            reason = "it must be installed, or lie in the current folder"
            if path.endswith(".py"):
                reason = f"write the module without '.py': '{path.removesuffix('.py').replace('/', '.')}:{name}'"
            raise InvalidModel(f"no module '{path}' for {what} '{function_path}': {reason}") from None
        raise InvalidModel(f"module '{path}' cannot be imported: {with_place(error)}") from error
    function: Callable[..., object] | None = getattr(module, name, None)
    if callable(function):
        return function
    hint = did_you_mean(name, [key for key in vars(module) if callable(getattr(module, key))])
    raise InvalidModel(f"module '{path}' has no function '{name}'{hint}")


def with_place(error: Exception) -> str:
    """Returns an error in words, after the file and line of the user's own code that it came from, if there is one."""
    text = f"{type(error).__name__}: {error}"
    own = [frame for frame in extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not own:
        return text
    path = Path(own[-1].filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{own[-1].lineno}: {text}"


def _is_users(file: str) -> bool:
    """Whether a file is neither of this package, nor of Python or an installed one."""
    paths = sysconfig.get_paths()
    installed = [str(PACKAGE), *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))]
    return not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in installed)


def _check_arguments(factory: str, function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "none"
        raise InvalidModel(
            f"factory '{factory}' does not take these arguments: {error}; given: {given}; it takes {signature}"
        ) from None


def source_digest(factory: str) -> str:
    """Returns the SHA-256 of the file that defines a factory; that of no bytes if there is no file."""
    with current_folder_importable():
        try:
            spec = importlib.util.find_spec(factory.partition(":")[0])
        except ModuleNotFoundError:
            spec = None
    source = Path(spec.origin).read_bytes() if spec and spec.origin and Path(spec.origin).is_file() else b""
    return hashlib.sha256(source).hexdigest()


def package_versions(factory: str) -> dict[str, object]:
    """Returns the version of the package whose models a factory of the zoo makes: its code is not in the factory."""
    if factory.partition(":")[0] != "bapipe.zoo.hugging_face":
        return {}
    try:
        return {"transformers": version("transformers")}
    except PackageNotFoundError:
        return {}
