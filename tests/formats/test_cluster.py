"""Devices of a cluster, and its links."""

from collections.abc import Callable
from itertools import permutations

import msgspec
import pytest

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Bandwidth, Cluster, Device, Link
from bapipe.formats.codec import decode_as, encode
from tests.builders import devices

SLOW = Bandwidth(bytes_per_s=5, latency_ns=7)


def on_hosts(*hosts: str) -> Cluster:
    """A device on each of some hosts; links between hosts are slow."""
    cluster = devices(len(hosts))
    placed = tuple(
        msgspec.structs.replace(device, host=host) for device, host in zip(cluster.devices, hosts, strict=True)
    )
    return msgspec.structs.replace(cluster, devices=placed, inter_host=SLOW)


def test_the_links_among_some_ranks_are_those_of_every_two() -> None:
    own = Link(source="d2", target="d0", bytes_per_s=3, latency_ns=1)
    for hosts in ("h", "hh", "gh", "ghg", "gghh"):
        cluster = on_hosts(*hosts)
        for each in (cluster, msgspec.structs.replace(cluster, links=(own,) if len(hosts) > 2 else ())):
            pairs = permutations(range(len(hosts)), 2)
            assert sorted(map(repr, each.links_among(range(len(hosts))))) == sorted(
                {repr(each.link(a, b)) for a, b in pairs}
            )


def test_a_listed_link_is_one_way() -> None:
    own = Link(source="d1", target="d0", bytes_per_s=3, latency_ns=1)
    cluster = msgspec.structs.replace(devices(2), links=(own,))
    assert cluster.link(1, 0) == Bandwidth(bytes_per_s=3, latency_ns=1)
    assert cluster.link(0, 1) == cluster.intra_host


def test_links_are_asked_for_by_ranks() -> None:
    for source, target, words in (("d0", "d1", "'d0' to 'd1'"), (0, 2, "0 to 2")):
        with pytest.raises(BapipeError, match=f"^no link from {words}: want ranks, from 0 to 1$"):
            devices(2).link(source, target)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bandwidth(bytes_per_s=0, latency_ns=0), "`bytes_per_s` is 0: want at least 1"),
        (lambda: Link(source="a", target="b", bytes_per_s=1, latency_ns=-1), "`latency_ns` is -1: want at least 0"),
        (
            lambda: Device(name="d", host="h", kind="a", memory_bytes=1, speed=0.0),
            "`speed` is 0.0: want more than 0",
        ),
        (
            lambda: Device(name="d", host="h", kind="a", memory_bytes="8GB"),  # type: ignore[arg-type]
            "`memory_bytes` is '8GB': want int",
        ),
        (lambda: msgspec.structs.replace(devices(1), devices=3), "`devices` is 3: want a list of Device"),
    ],
)
def test_what_no_device_or_link_has_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(BapipeError) as caught:
        make()
    assert str(caught.value) == message


def test_sizes_and_rates_may_be_whole_floats() -> None:
    """25 Gbit/s are 3,125,000,000 bytes per second."""
    device = Device(name="d0", host="h", kind="a", memory_bytes=16e9)  # type: ignore[arg-type]
    link = Bandwidth(bytes_per_s=25e9 / 8, latency_ns=0)  # type: ignore[arg-type]
    cluster = Cluster(devices=[device], intra_host=link, inter_host=link)  # type: ignore[arg-type]
    assert decode_as(encode(cluster), Cluster) == cluster
    assert (cluster.devices[0].memory_bytes, cluster.intra_host.bytes_per_s) == (16_000_000_000, 3_125_000_000)
