"""Checks of devices and groups of them: each with a profile of its size, and alike where gradients meet."""

from collections.abc import Iterable, Sequence

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Device
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.profile import ModelProfile

_OF_MODEL = "no_gradient", "allows_replicas", "shares"
"""What profiles of one model agree on, of every layer, ..."""

_OF_PARAMETERS = "weight_bytes", "gradient_bytes", "group_gradient_bytes", "shared_bytes", "shared_gradient_bytes"
"""... and those of as many members, too."""


def check_members(device: Device, profile: ModelProfile) -> None:
    """Raises BapipeError unless a profile is of as many members as a device has."""
    wanted = device.num_members
    if wanted != profile.device.num_members:
        raise BapipeError(
            f"device '{device.name}' is {_in_words(wanted)}, and the profile of kind '{device.kind}' is of "
            f"{_in_words(profile.device.num_members)}: measure or estimate one of {_in_words(wanted)}, or change "
            "`members` in the cluster"
        )


def check_same_training(profiles: Iterable[ModelProfile]) -> None:
    """Raises BapipeError unless profiles agree on which layers have gradients and may have replicas.

    Those of as many members must agree on the bytes of each layer's parameters, too: replicas of a stage sum the
    gradients of the same parameters, bucket by bucket.
    """
    given = list(profiles)
    first_of_size = {first.device.num_members: first for first in given[:1]}
    for profile in given[1:]:
        _check_same(given[0], profile, _OF_MODEL)
        same_size = first_of_size.setdefault(profile.device.num_members, profile)
        if same_size is not profile:
            _check_same(same_size, profile, _OF_PARAMETERS)


def _check_same(one: ModelProfile, other: ModelProfile, names: Sequence[str]) -> None:
    for layer, same in zip(one.layers, other.layers, strict=False):  # of other models, others complain
        for name in names if layer.name == same.name else ():
            value, other_value = getattr(layer, name), getattr(same, name)
            if value != other_value:
                raise BapipeError(
                    f"the profiles of {one.device.kind} and {other.device.kind} are of different training: "
                    f"{name.replace('_', ' ')} of layer '{layer.name}' is {_value(value)} in one and "
                    f"{_value(other_value)} in the other: profile one model, with the same parameters trained"
                )


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "empty"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).lower()


def check_tied_weights(devices: Iterable[Device], layers: Iterable[LayerProfile]) -> None:
    """Raises BapipeError for tied weights on groups of unlike sizes: their gradients have unlike shapes."""
    sizes = {device.num_members for device in devices}
    tied = next((layer for layer in layers if layer.shared_bytes), None)
    if tied is not None and len(sizes) > 1:
        raise BapipeError(
            f"layer '{tied.name}' shares parameters with {' and '.join(map(repr, tied.shares))}, and the devices have "
            f"{' and '.join(map(str, sorted(sizes)))} members, so that the gradients have unlike shapes: use groups of "
            "one size"
        )


def check_replicas(stage: int, replicas: Sequence[Device]) -> None:
    """Raises BapipeError if the replicas of a stage are groups of unlike sizes."""
    first = replicas[0]
    for other in replicas:
        if other.num_members != first.num_members:
            raise BapipeError(
                f"stage {stage}: its replicas '{first.name}', {_in_words(first.num_members)}, and '{other.name}', "
                f"{_in_words(other.num_members)}, have gradients of unlike shapes: use replicas with as many members"
            )


def _in_words(num_members: int) -> str:
    return "a single device" if num_members == 1 else f"a group of {num_members}"
