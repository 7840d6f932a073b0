"""Checks of what a profile says of the members of a group."""

from typing import TYPE_CHECKING

import msgspec

from bapipe.errors import InvalidFile

if TYPE_CHECKING:
    from bapipe.formats.measurement import LayerMeasurement
    from bapipe.formats.profile import ModelProfile

NO_GROUP = "the profile is not of a group: its device has no `members`"


def check_group(profile: "ModelProfile") -> None:
    """Raises InvalidFile if what a profile says of a group is incomplete or contradictory."""
    device = profile.device
    is_group = device.members is not msgspec.UNSET
    if is_group != (device.split is not msgspec.UNSET):
        raise InvalidFile("want both `members` and `split`, or neither", "$.device")
    if device.members == 1:
        raise InvalidFile("a group has two or more members; leave `members` and `split` out", "$.device.members")
    for index, layer in enumerate(profile.layers):
        where = f"$.layers[{index}].group_sum_bytes"
        if layer.group_sum_bytes is not msgspec.UNSET and not is_group:
            raise InvalidFile(NO_GROUP, where)
        if layer.group_gradient_bytes > layer.gradient_bytes:
            raise InvalidFile(f"{layer.group_gradient_bytes} is more than the bytes of the gradients", where)
    for m, measurement in enumerate(profile.measurements):
        for index, measured in enumerate(measurement.layers):
            _check_exchange(measured, is_group, f"$.measurements[{m}].layers[{index}]")


def _check_exchange(measured: "LayerMeasurement", is_group: bool, where: str) -> None:
    """Raises InvalidFile if the members exchange data for longer than the layer takes."""
    for field, exchange_ns, ns in (
        ("forward_exchange_ns", measured.forward_exchange_ns, measured.forward_ns),
        ("backward_exchange_ns", measured.backward_exchange_ns, measured.whole_backward_ns),
    ):
        if exchange_ns is msgspec.UNSET:
            continue
        if not is_group:
            raise InvalidFile(NO_GROUP, f"{where}.{field}")
        if exchange_ns > ns:
            raise InvalidFile(f"{exchange_ns} is more than the {ns} ns that it is a part of", f"{where}.{field}")
