"""Folders of the user's own, for what is kept between commands."""

import os
from pathlib import Path

from bapipe.errors import BapipeError


def user_folder(variable: str, default: str) -> Path:
    """Returns bapipe's folder in the one that an environment variable names, by default in one of the home folder.

    Raises:
        BapipeError: the variable is not set, and the system knows no home folder of this user.
    """
    given = os.environ.get(variable)
    try:
        return Path(given or Path.home() / default) / "bapipe"
    except RuntimeError:
        raise BapipeError(f"this user has no home folder: set {variable} to a folder that can be written") from None
