"""The types of devices that torch drives, and the kinds that profiles and clusters name."""

from typing import Literal, cast, get_args

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan

DeviceType = Literal["cpu", "cuda"]


def type_of_kind(kind: str) -> DeviceType | None:
    """Returns the type of devices of a kind: the kind itself, or what is before its first hyphen (`cuda-rtx3090`).

    None if torch drives no such devices, or the kind does not say which.
    """
    first = kind.partition("-")[0]
    return cast(DeviceType, first) if first in get_args(DeviceType) else None


def type_to_run(plan: Plan) -> DeviceType:
    """Returns the one type of the devices that have a stage.

    Raises:
        BapipeError: they are of several types, or of one that torch does not drive.
    """
    used = set(plan.used_devices)
    kinds = sorted({device.kind for device in plan.cluster.devices if device.name in used})
    types = {type_of_kind(kind) for kind in kinds}
    if len(types) == 1 and (one := types.pop()) is not None:
        return one
    raise BapipeError(
        f"the plan's devices are of kind {', '.join(kinds)}; torch can run a plan of kind cpu or of kind cuda, or of "
        "kinds that all begin with cpu- or with cuda-"
    )
