"""From the name of a factory to the Example it returns."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches

import torch

from bapipe.errors import BapipeError, InvalidModel
from bapipe.zoo.example import Example


def build(factory: str, arguments: Mapping[str, object], meta: bool = False) -> Example:
    """Returns what a factory, given as `module.path:function`, makes of the arguments.

    The current folder is searched for the module too. With `meta`, parameters take no memory and hold no values.

    Raises:
        InvalidModel: no such module or function, arguments it does not take, an error inside it, or another result
            than an Example.
    """
    with _current_folder_importable():
        function = _find(factory)
        _check_arguments(factory, function, arguments)
        try:
            with torch.device("meta") if meta else nullcontext():
                example = function(**arguments)
        except BapipeError:
            raise
        except Exception as error:  # whatever the factory's own code raises
            raise InvalidModel(f"factory '{factory}' failed: {type(error).__name__}: {error}") from error
    if not isinstance(example, Example):
        raise InvalidModel(
            f"factory '{factory}' returned a {type(example).__name__}; want a bapipe.zoo.example.Example with the "
            "module, example inputs, a target and the loss"
        )
    return example


def _find(factory: str) -> Callable[..., object]:
    path, _, name = factory.partition(":")
    try:
        module = importlib.import_module(path)
    except Exception as error:  # importing runs the module's own code
        if isinstance(error, ModuleNotFoundError) and error.name and f"{path}.".startswith(f"{error.name}."):
            raise InvalidModel(
                f"no module '{path}' for factory '{factory}': it must be installed, or lie in the current folder"
            ) from None
        raise InvalidModel(f"module '{path}' cannot be imported: {type(error).__name__}: {error}") from error
    function: Callable[..., object] | None = getattr(module, name, None)
    if callable(function):
        return function
    close = get_close_matches(name, [key for key in vars(module) if callable(getattr(module, key))], n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise InvalidModel(f"module '{path}' has no function '{name}'{hint}")


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


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    folder = os.getcwd()
    if folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
