"""Tries to unpickle a file in a process of its own."""

import pickle
from collections.abc import Callable
from pathlib import Path


def try_to_unpickle(index: int, send: Callable[[object], None], path: Path) -> None:
    """Sends the name of what reading a pickle in a file raises."""
    try:
        pickle.load(path.open("rb"))
    except BaseException as error:
        send(type(error).__name__)
