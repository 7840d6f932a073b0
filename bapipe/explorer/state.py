"""What the controls of the page say, as the page sends it."""

from collections.abc import Iterator, Sequence
from itertools import count, repeat
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.units import NonNegative, Positive

MAX_SHOWN_DEVICES = 256
"""Maximum number of devices of the page; with more, neither the picture nor the tables can be read, and the step of as
many stages takes seconds to simulate and to send."""

MAX_FACTOR = 10**6
"""Largest factor of a speed, of the bandwidth or of the latency."""

Factor = Annotated[float, msgspec.Meta(gt=0, le=MAX_FACTOR)]


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decisions of a plan, and how its cluster differs from the given one.

    Attributes:
        cuts: how many layers are before each cut. [stages - 1]
        devices: names. [stages, replicas]
        recompute: [stages]
        recompute_layers: names of layers; a stage that recomputes and has some of them recomputes these only.
        layer_order: the layers in the order in which they are cut, by their places in the profile; None for the
            profile's order.
        num_devices: the first devices of the cluster; beyond its number, more like its last one, on the same host; of
            several hosts, more hosts like the last one.
        speeds: factors of the speeds of some devices, by name.
        bandwidth, latency: factors for all links.
        memory_bytes: the memory of every device, None for what each has.
        constraints: for the planner, such as `conv1 on gpu0`.
    """

    cuts: tuple[Positive, ...]
    devices: tuple[tuple[str, ...], ...]
    recompute: tuple[bool, ...]
    recompute_layers: tuple[str, ...] = ()
    layer_order: tuple[NonNegative, ...] | None = None
    schedule: str
    minibatch_size: Positive
    microbatch_size: Positive
    num_devices: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHOWN_DEVICES)]
    speeds: dict[str, Factor] = {}
    bandwidth: Factor = 1.0
    latency: Annotated[float, msgspec.Meta(ge=0, le=MAX_FACTOR)] = 1.0
    memory_bytes: Positive | None = None
    constraints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.devices) != len(self.cuts) + 1 or len(self.recompute) != len(self.devices):
            raise BapipeError(
                f"{len(self.cuts)} cuts, devices of {len(self.devices)} stages and {len(self.recompute)} choices of "
                "recomputation: want one more stage than cuts"
            )


def cluster_of(state: State, given: Cluster) -> Cluster:
    """Returns the cluster with the changes of a state."""
    devices = tuple(_changed(device, state) for device in _devices(given, state.num_devices))
    names = _names(devices)
    links = tuple(
        msgspec.structs.replace(
            link,
            bytes_per_s=_scaled(link.bytes_per_s, state.bandwidth),
            latency_ns=round(link.latency_ns * state.latency),
        )
        for link in given.links
        if {link.source, link.target} <= names
    )
    return msgspec.structs.replace(
        given,
        devices=devices,
        intra_host=_changed_link(given.intra_host, state),
        inter_host=_changed_link(given.inter_host, state),
        links=links,
    )


def _devices(given: Cluster, num: int) -> list[Device]:
    devices, further = list(given.devices[:num]), _further_devices(given)
    names = _names(given.devices)
    number = len(devices)
    while len(devices) < num:
        like = next(further)
        name = f"{like.kind}{number}"
        while not names.isdisjoint([name, *(_members(like, name) or ())]):
            number += 1
            name = f"{like.kind}{number}"
        number += 1
        devices.append(msgspec.structs.replace(like, name=name, members=_members(like, name)))
    return devices


def _further_devices(given: Cluster) -> Iterator[Device]:
    """Yields what devices beyond a cluster are like, with their hosts: the last one, or, of several hosts, the last."""
    last, hosts = given.devices[-1], {device.host for device in given.devices}
    if len(hosts) == 1:
        yield from repeat(last)
    for number in count(len(hosts)):
        if (host := f"host{number}") not in hosts:
            yield from (msgspec.structs.replace(one, host=host) for one in given.devices if one.host == last.host)


def _members(like: Device, name: str) -> tuple[str, ...] | UnsetType:
    return UNSET if like.members is UNSET else tuple(f"{name}.{i}" for i in range(like.num_members))


def _names(devices: Sequence[Device]) -> set[str]:
    """Returns the names that links may join: those of devices, and of the members of groups."""
    return {name for device in devices for name in (device.name, *(device.members or ()))}


def _changed(device: Device, state: State) -> Device:
    factor = state.speeds.get(device.name, 1.0)
    speed = device.speed if factor == 1.0 else float(f"{device.speed * factor:.6g}")
    return msgspec.structs.replace(device, speed=speed, memory_bytes=state.memory_bytes or device.memory_bytes)


def _changed_link(link: Bandwidth, state: State) -> Bandwidth:
    return Bandwidth(
        bytes_per_s=_scaled(link.bytes_per_s, state.bandwidth), latency_ns=round(link.latency_ns * state.latency)
    )


def _scaled(bytes_per_s: int, factor: float) -> int:
    return bytes_per_s if factor == 1.0 else max(1, round(bytes_per_s * factor))
