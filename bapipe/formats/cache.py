"""Where profiles of named models, plans, and what data is read with are kept between commands."""

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from bapipe.errors import BapipeError
from bapipe.formats.codec import fingerprint, read, write, write_bytes
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile

T = TypeVar("T", ModelProfile, Plan)


def profile_path(key: Mapping[str, object]) -> Path:
    """Returns the file of the profile measured under what `key` says, under $XDG_CACHE_HOME or ~/.cache.

    Raises:
        BapipeError: the folder cannot be made.
    """
    path = _path(key, "profile")
    _make(path.parent)
    return path


def plan_path(key: Mapping[str, object]) -> Path:
    """Returns the file of the plan that the planner as it is makes of what `key` says; its folder may not be there."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(file.read_bytes())
    return _path({**key, "code": code.hexdigest()}, "plan")


def store_plan(path: Path, plan: Plan) -> None:
    """Writes a plan where `load_plan` will find it; only warns where that cannot be."""
    try:
        _make(path.parent)
        write(path, plan)
    except BapipeError as error:
        logging.getLogger(__name__).warning("the plan is not kept for the next time: %s", error)


def load_bytes(name: str) -> bytes | None:
    """Returns what was kept under a name, None where there is nothing."""
    try:
        return (_root() / name).read_bytes()
    except OSError:
        return None


def store_bytes(name: str, content: bytes) -> None:
    """Keeps bytes where `load_bytes` will find them; only warns where that cannot be."""
    try:
        _make(_root())
        write_bytes(_root() / name, content)
    except BapipeError as error:
        logging.getLogger(__name__).warning("%s is not kept for the next time: %s", name, error)


def store_profile_by_fingerprint(profile: ModelProfile) -> None:
    """Writes a profile where `load_profile_by_fingerprint` will find it; only warns where that cannot be."""
    path = _path({"fingerprint": fingerprint(profile)}, "profile")
    if path.exists():
        return
    try:
        _make(path.parent)
        write(path, profile)
    except BapipeError as error:
        logging.getLogger(__name__).warning("the profile is not kept to plan with again: %s", error)


def load_profile_by_fingerprint(known_as: str) -> ModelProfile | None:
    """Returns a profile that was planned with on this machine, None where it is not kept."""
    found = load_profile(_path({"fingerprint": known_as}, "profile"))
    return found if found is not None and fingerprint(found) == known_as else None


def _path(key: Mapping[str, object], kind: str) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:16]
    return _root() / f"{digest}.{kind}.json"


def _root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bapipe"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BapipeError(f"{folder}: cannot be made: {error.strerror}; set XDG_CACHE_HOME to another folder") from None


def load_profile(path: Path) -> ModelProfile | None:
    """Returns the profile kept at `path`; None where there is none, or one that cannot be read any more."""
    return _cached(path, ModelProfile)


def load_plan(path: Path) -> Plan | None:
    """Returns the plan kept at `path`; None where there is none, or one that cannot be read any more."""
    return _cached(path, Plan)


def _cached(path: Path, want: type[T]) -> T | None:
    try:
        return read(path, want)
    except BapipeError:
        return None
