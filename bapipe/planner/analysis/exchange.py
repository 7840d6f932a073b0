"""How long the members of a group exchange data for the layers of a stage."""

from collections.abc import Iterable, Sequence

from msgspec import UNSET

from bapipe.formats.cluster import Device
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan


def fixed_exchange_words(devices: Iterable[Device]) -> str:
    """Returns that other links do not change what the members of groups exchange; nothing if no device is a group."""
    if all(device.num_members == 1 for device in devices):
        return ""
    return (
        "the members of groups exchange data for as long as the profile says, whatever the links: for others, measure "
        "the profile anew or estimate it with `bapipe estimate`"
    )


def stage_layers(stage: StagePlan, profile: ModelProfile, microbatch_size: int) -> list[LayerMeasurement]:
    """Returns the measurements of a stage's layers."""
    of_layer = dict(zip((layer.name for layer in profile.layers), profile.at(microbatch_size), strict=True))
    return [of_layer[name] for name in stage.layers]


def exchange_share(stage: StagePlan, profile: ModelProfile, microbatch_size: int, speed: float) -> float:
    """Returns the share of the F and B of a stage, on a device of a speed, in which the members exchange data."""
    measured = stage_layers(stage, profile, microbatch_size)
    return sum(m.exchange_ns for m in measured) / (device_ns(measured, speed) or 1)


def device_ns(measured: Sequence[LayerMeasurement], speed: float) -> float:
    """Returns how long F and B of layers take on a device, whose speed does not divide what members exchange."""
    exchanged_ns = sum(m.exchange_ns for m in measured)
    computed_ns = sum(m.forward_backward_ns for m in measured) - exchanged_ns
    return computed_ns / speed + exchanged_ns


def exchange_ns(stage: StagePlan, profile: ModelProfile, microbatch_size: int) -> int:
    """Returns how long members exchange data in F and B of a micro-batch, with the F of layers that are recomputed."""
    recomputed = set(stage.recomputed)
    total_ns = 0
    for name, measured in zip(stage.layers, stage_layers(stage, profile, microbatch_size), strict=True):
        total_ns += measured.exchange_ns
        if name in recomputed and measured.forward_exchange_ns is not UNSET:
            total_ns += measured.forward_exchange_ns
    return total_ns
