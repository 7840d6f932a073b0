"""The types of devices that torch drives, and the kinds that profiles and clusters name."""

from typing import Literal, get_args

DeviceType = Literal["cpu", "cuda"]
DEVICE_TYPES: tuple[DeviceType, ...] = get_args(DeviceType)
"""Those that are measured, in the order in which they are named."""


def type_of_kind(kind: str) -> DeviceType | None:
    """Returns the type of devices of a kind: the kind itself, or what is before its first hyphen (`cuda-rtx3090`).

    None if torch drives no such devices, or the kind does not say which.
    """
    first = kind.partition("-")[0]
    return first if first in DEVICE_TYPES else None
