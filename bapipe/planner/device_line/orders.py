"""The orders in which plans for many devices take them: the cluster's, and by speed where the devices differ."""

from dataclasses import dataclass
from statistics import fmean

from msgspec import UNSET

from bapipe.planner.device_line.line import DeviceLine
from bapipe.planner.searched_space import GIVEN_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOrder:
    """An order of a cluster's ranks; `words` name it in a certificate and are part of plan files."""

    words: str
    ranks: tuple[int, ...]


def device_orders(line: DeviceLine) -> list[DeviceOrder]:
    """Returns the orders that differ: the cluster's, the fastest first, and the slowest first.

    Of devices that differ in nothing but their speed the cluster's order is left out, as it is one of many at random.
    The devices of a host stay together where links within hosts are not like those between them.

    Args:
        line: the devices in the cluster's order.
    """
    cluster, ns_per_sample = line.cluster, line.ns_per_sample
    hosts = [device.host for device in cluster.devices]
    keeps_hosts = cluster.intra_host != cluster.inter_host or cluster.intra_host_sum is not UNSET
    times_of = {host: [ns for own, ns in zip(hosts, ns_per_sample, strict=True) if own == host] for host in set(hosts)}
    mean_ns = {host: fmean(times) for host, times in times_of.items()}
    first = {host: hosts.index(host) for host in times_of}

    def key(rank: int, sign: int) -> tuple[float, int, float]:
        host, own = hosts[rank], sign * ns_per_sample[rank]
        return (sign * mean_ns[host], first[host], own) if keeps_hosts else (own, 0, 0.0)

    every = range(len(hosts))
    is_at_random = line.differ_in_speed_alone and not keeps_hosts and not cluster.links
    orders = [] if is_at_random else [DeviceOrder(words=GIVEN_ORDER, ranks=tuple(every))]
    what = " hosts" if keeps_hosts else ""
    for words, sign in ((f"the fastest{what} first", 1), (f"the slowest{what} first", -1)):
        ranks = tuple(sorted(every, key=lambda rank, sign=sign: key(rank, sign)))  # type: ignore[misc]
        if all(ranks != order.ranks for order in orders):
            orders.append(DeviceOrder(words=words, ranks=ranks))
    return orders
