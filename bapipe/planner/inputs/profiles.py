"""Profiles as a caller may give them, one, several or by kind of device, and in the forms that planning takes."""

from collections.abc import Iterable, Mapping
from reprlib import repr as shortened

from bapipe.errors import BapipeError
from bapipe.formats.profile import ModelProfile, ProfilesByKind

Profiles = ModelProfile | Iterable[ModelProfile] | ProfilesByKind
"""One profile, several for different device kinds, or profiles by kind."""


def collected(profiles: Profiles) -> tuple[ModelProfile, ...] | ProfilesByKind:
    """Returns profiles by kind as they are, and others as a tuple: an iterator can be read only once.

    Raises:
        BapipeError: there is none, or something else is among them.
    """
    if isinstance(profiles, Mapping):
        found = tuple(profiles.values())
    elif isinstance(profiles, ModelProfile | str) or not isinstance(profiles, Iterable):
        found = (profiles,)
    else:
        found = tuple(profiles)
    for one in found:
        if not isinstance(one, ModelProfile):
            raise BapipeError(
                f"{shortened(one)} is no profile: want what `bapipe.profile`, or `bapipe.read(path, "
                "bapipe.ModelProfile)`, returns"
            )
    if not found:
        raise BapipeError("no profile given")
    return profiles if isinstance(profiles, Mapping) else found


def listed(profiles: Profiles) -> tuple[ModelProfile, ...]:
    """Returns the profiles as a tuple; raises BapipeError as `collected` does."""
    found = collected(profiles)
    return tuple(found.values()) if isinstance(found, Mapping) else found


def by_kind(profiles: Profiles) -> dict[str, ModelProfile]:
    """Returns profiles by device kind.

    Raises:
        BapipeError: there is none, something else is among them, or two are of the same kind.
    """
    found = collected(profiles)
    if isinstance(found, Mapping):
        return dict(found)
    known: dict[str, ModelProfile] = {}
    for one in found:
        if one.device.kind in known:
            raise two_of_a_kind(one.device.kind)
        known[one.device.kind] = one
    return known


def num_layers(profiles: ProfilesByKind) -> int:
    """Returns how many layers the model has that all profiles are of."""
    return len(next(iter(profiles.values())).layers)


def two_of_a_kind(kind: str) -> BapipeError:
    """Returns the error for two profiles of one kind."""
    return BapipeError(
        f"two profiles are of device kind '{kind}': give one for each kind; what was measured on other hardware needs "
        f"a kind of its own, such as {kind}-small (profile with `kind`), which those devices of the cluster have, too"
    )
