"""Links between classes of devices: those of their devices, looked up when they are asked for."""

from itertools import product

import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.planner.stages.devices import ClassLinks, device_classes
from tests.builders import devices

FAST, SLOW = Bandwidth(bytes_per_s=10**12, latency_ns=0), Bandwidth(bytes_per_s=10**9, latency_ns=0)


def test_only_links_that_are_asked_for_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand unlike devices, two on each host, have a million pairs."""
    num = 1000
    unlike = tuple(
        replace(device, host=f"h{rank // 2}", speed=1 + rank / num) for rank, device in enumerate(devices(num).devices)
    )
    cluster = replace(devices(num), devices=unlike, intra_host=FAST, inter_host=SLOW)
    classes = device_classes(cluster, [1] * num, [None] * num, [1 / device.speed for device in unlike])
    looked_up: list[tuple[int, int]] = []
    link = Cluster.link

    def note(self: Cluster, source: int, target: int) -> Bandwidth:
        looked_up.append((source, target))
        return link(self, source, target)

    monkeypatch.setattr(Cluster, "link", note)
    links = ClassLinks(cluster, classes)
    host_of = [cls.ranks[0] // 2 for cls in classes]
    assert len(host_of) == num
    for a, b in product(range(12), range(12)):
        expected = [] if a == b else [FAST if host_of[a] == host_of[b] else SLOW]
        assert links.between([a], [b]) == expected
    assert len(looked_up) == 12 * 11
