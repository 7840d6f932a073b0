"""The links of a cluster."""

from itertools import permutations

import msgspec

from bapipe.formats.cluster import Bandwidth, Cluster, Link
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
