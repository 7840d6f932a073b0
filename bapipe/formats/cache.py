"""The cache between commands, under $XDG_CACHE_HOME/bapipe: profiles of named models, plans, tokenizers."""

import hashlib
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from bapipe.errors import BapipeError
from bapipe.formats.codec import encode, fingerprint, read
from bapipe.formats.files import write_bytes
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.user_folders import user_folder

T = TypeVar("T", ModelProfile, Plan)


def profile_path(key: Mapping[str, object]) -> Path:
    """Returns the file of the profile that was measured under the conditions in `key`."""
    return _path(key, "profile")


def plan_path(key: Mapping[str, object]) -> Path:
    """Returns the file of the plan that this version of the package makes of the inputs in `key`."""
    return _path({**key, "code": _code_digest()}, "plan")


@cache
def _code_digest() -> str:
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(file.read_bytes())
    return code.hexdigest()


def store_plan(path: Path, plan: Plan) -> None:
    """Writes a plan where `load_plan` reads it; only warns if that fails."""
    _store(path, encode(plan), "the plan is not cached")


def store_profile(path: Path, profile: ModelProfile) -> None:
    """Writes a profile where `load_profile` reads it; only warns if that fails."""
    _store(path, encode(profile), "the profile is not cached")


def store_unfinished_profile(path: Path, profile: ModelProfile) -> bool:
    """Returns whether a profile that lacks sizes was written where `load_profile` reads it; only warns if not."""
    return _store(path, encode(profile), "measurements are lost if they are interrupted")


def load_bytes(name: str) -> bytes | None:
    """Returns the bytes that were stored under a name, None if there are none."""
    try:
        return (cache_folder() / name).read_bytes()
    except OSError:
        return None


def store_bytes(name: str, content: bytes) -> None:
    """Writes bytes where `load_bytes` reads them; only warns if that fails."""
    _store(cache_folder() / name, content, f"{name} is not cached")


def store_profile_by_fingerprint(profile: ModelProfile) -> None:
    """Writes a profile where `load_profile_by_fingerprint` reads it; only warns if that fails."""
    path = _path({"fingerprint": fingerprint(profile)}, "profile")
    if not path.exists():
        _store(path, encode(profile), "the profile is not cached, so a run cannot plan again with it")


def load_profile_by_fingerprint(known_as: str) -> ModelProfile | None:
    """Returns a profile that was used to plan on this machine, None if it is not in the cache."""
    found = load_profile(_path({"fingerprint": known_as}, "profile"))
    return found if found is not None and fingerprint(found) == known_as else None


def _path(key: Mapping[str, object], kind: str) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:16]
    return cache_folder() / f"{digest}.{kind}.json"


def cache_folder() -> Path:
    """Returns the folder of the cache, which may not exist yet."""
    return user_folder("XDG_CACHE_HOME", ".cache")


def _store(path: Path, content: bytes, loss: str) -> bool:
    """Returns whether bytes were written, in a folder that is made if needed; else warns of the loss."""
    try:
        _make(path.parent)
        write_bytes(path, content)
    except BapipeError as error:
        logging.getLogger(__name__).warning("%s: %s", loss, error)
        return False
    return True


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BapipeError(f"{folder}: cannot be made: {error.strerror}; set XDG_CACHE_HOME to another folder") from None


def load_profile(path: Path) -> ModelProfile | None:
    """Returns the profile stored at `path`; None if there is none, or if it cannot be read any more."""
    return _cached(path, ModelProfile)


def load_plan(path: Path) -> Plan | None:
    """Returns the plan stored at `path`; None if there is none, or if it cannot be read any more."""
    return _cached(path, Plan)


def _cached(path: Path, want: type[T]) -> T | None:
    try:
        return read(path, want)
    except BapipeError:
        return None
