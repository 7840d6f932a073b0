"""Where profiles of named models are kept between commands."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from bapipe.codec import read
from bapipe.errors import BapipeError
from bapipe.profile import ModelProfile


def profile_path(key: Mapping[str, object]) -> Path:
    """Returns the file of the profile measured under what `key` says, under $XDG_CACHE_HOME or ~/.cache.

    Raises:
        BapipeError: the folder cannot be made.
    """
    digest = hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bapipe"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BapipeError(f"{root}: cannot be made: {error.strerror}; set XDG_CACHE_HOME to another folder") from None
    return root / f"{digest}.profile.json"


def cached_profile(path: Path) -> ModelProfile | None:
    """Returns the profile kept at `path`; None where there is none, or one that cannot be read any more."""
    try:
        return read(path, ModelProfile)
    except BapipeError:
        return None
