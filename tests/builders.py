"""Profiles and clusters with figures by hand, for tests of every package."""

from collections.abc import Sequence

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import DeviceKind, ModelProfile

MS = 1_000_000
"""A millisecond in nanoseconds."""


def profile_of(
    model: str,
    layers: Sequence[LayerProfile],
    measured: Sequence[LayerMeasurement],
    *,
    microbatch_size: int = 1,
    memory_bytes: int = 10**9,
) -> ModelProfile:
    """Layers measured on a device of kind a, at one micro-batch size, in float32 with sgd."""
    return ModelProfile(
        model=model,
        device=DeviceKind(kind="a", name="none", memory_bytes=memory_bytes),
        dtype="float32",
        optimizer="sgd",
        layers=tuple(layers),
        measurements=(Measurement(microbatch_size=microbatch_size, layers=tuple(measured)),),
    )


def chain(forward_ms: list[int], *, param_bytes: int = 0, stash_bytes: int = 0, output_bytes: int = 0) -> ModelProfile:
    """Layers l0, l1, ... whose backward takes twice their forward; one micro-batch size."""
    return profile_of(
        "chain",
        [
            LayerProfile(
                name=f"l{i}",
                kind="Layer",
                inputs=(f"t{i}",),
                outputs=(f"t{i + 1}",),
                param_bytes=param_bytes,
                optimizer_state_bytes=0,
            )
            for i in range(len(forward_ms))
        ],
        [
            LayerMeasurement(
                forward_ns=f * MS,
                input_grad_ns=f * MS,
                weight_grad_ns=f * MS,
                stash_bytes=stash_bytes,
                output_bytes=(output_bytes,),
            )
            for f in forward_ms
        ],
    )


def devices(
    num: int, *, memory_bytes: int = 10**9, bytes_per_s: int = 10**9, latency_ns: int = 0, overlaps: bool = True
) -> Cluster:
    """Equal devices d0, d1, ... of kind a on one host h, all links equal."""
    link = Bandwidth(bytes_per_s=bytes_per_s, latency_ns=latency_ns)
    return Cluster(
        devices=tuple(
            Device(name=f"d{i}", host="h", kind="a", memory_bytes=memory_bytes, overlaps_transfers=overlaps)
            for i in range(num)
        ),
        intra_host=link,
        inter_host=link,
    )
