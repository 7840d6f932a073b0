"""Options given as one dataclass or as keyword arguments: one helper for every function that takes both spellings."""

from collections.abc import Mapping
from dataclasses import fields
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, TypeVar

from bapipe.errors import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def options_from(cls: type[T], given: T | None, keywords: Mapping[str, Any]) -> T:
    """Returns the options that a caller gave, either as an object of type `cls` or as keyword arguments.

    Raises:
        TypeError: both spellings at once, an object of another type, an unknown name, or a missing one; an unknown name
            comes with the closest known one.
    """
    if given is not None:
        if keywords:
            raise TypeError(f"give either {cls.__name__}(...) or keyword arguments, not both: {', '.join(keywords)}")
        if not isinstance(given, cls):
            raise TypeError(f"{shortened(given)} is no {cls.__name__}: give {cls.__name__}(...) or keyword arguments")
        return given
    known = [field.name for field in fields(cls)]
    for name in keywords:
        if name not in known:
            hint = did_you_mean(name, known) or f"; choose from {', '.join(known)}"
            raise TypeError(f"unknown option '{name}'{hint}")
    return cls(**keywords)
