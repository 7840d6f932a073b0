"""What leaves a host: published bytes per second by GPU and number of senders (docs/clusters.md, rule 15)."""

from collections.abc import Mapping, Sequence

from bapipe.formats.cluster import Link

BETWEEN_HOSTS: Mapping[str, Mapping[int, int]] = {
    "GH-96": {1: 22_934_533_177, 2: 45_696_046_498, 4: 92_551_901_044},
    "RTX-2080": {1: 2_855_813_402, 2: 2_857_690_230, 4: 2_857_722_937, 8: 2_857_736_369},
    "Titan-RTX": {1: 2_856_544_701, 2: 2_857_650_203, 4: 2_857_686_333, 8: 2_857_712_077},
    "RTX-3090": {1: 115_701_788, 2: 115_701_788, 4: 115_701_788, 8: 114_876_125},
}
"""For large messages, at commit cf2c8e3 of github.com/eth-easl/sailor (MIT licence), network_coeffs_all_homo.json."""


def member_bytes_per_s(gpu: str, members: int) -> int:
    """Returns what each member of a group sends to another host while all of them do."""
    return BETWEEN_HOSTS[gpu][members] // members


def slower_links(hosts: Mapping[str, tuple[str, int]]) -> tuple[Link, ...]:
    """Returns the links between groups, by name of the group its GPU and members: each as fast as the slower end."""
    rates = {name: member_bytes_per_s(gpu, members) for name, (gpu, members) in hosts.items()}
    return tuple(
        Link(source=a, target=b, bytes_per_s=min(rates[a], rates[b]), latency_ns=0)
        for a, b in _pairs(list(hosts))
        if min(rates[a], rates[b]) != max(rates.values())
    )


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(a, b) for a in names for b in names if a != b]
