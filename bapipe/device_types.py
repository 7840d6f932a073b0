"""The types of devices that torch drives, and the kinds that profiles and clusters name."""

from typing import Literal, cast, get_args

DeviceType = Literal["cpu", "cuda"]


def type_of_kind(kind: str) -> DeviceType | None:
    """Returns the type of devices of a kind: the kind itself, or what is before its first hyphen (`cuda-rtx3090`).

    None if torch drives no such devices, or the kind does not say which.
    """
    first = kind.partition("-")[0]
    return cast(DeviceType, first) if first in get_args(DeviceType) else None
