"""The orders in which plans take the devices if they are many: the cluster's order, by speed, by memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.results.searched_space import GIVEN_ORDER
from bapipe.planner.stages.constraints import parse_constraints
from bapipe.planner.stages.devices import ns_per_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOrder:
    """An order of a cluster's ranks; `words` describe it in certificates, and so are part of plan files."""

    words: str
    ranks: tuple[int, ...]


def device_orders(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> tuple[DeviceOrder, ...]:
    """Returns distinct orders of the devices: the cluster's, fastest first, slowest first, and most memory first.

    With the most memory first, early stages, which keep more micro-batches in flight, have the most memory, and plans
    on fewer devices do without those with the least. If devices differ in nothing but their speed, the cluster's order
    is left out, because it is arbitrary.
    The devices of a host stay together if links within hosts differ from those between hosts.
    """
    limits, times_ns = options.limits(cluster), ns_per_sample(profiles, cluster)
    hosts = [device.host for device in cluster.devices]
    keeps_hosts = not cluster.hosts_are_alike and len(set(hosts)) > 1
    is_arbitrary = _differ_in_speed_alone(cluster, options) and cluster.hosts_are_alike and not cluster.links
    orders = [] if is_arbitrary else [DeviceOrder(words=GIVEN_ORDER, ranks=tuple(range(len(hosts))))]
    what = " hosts" if keeps_hosts else ""
    rankings: list[tuple[str, Sequence[float]]] = [
        (f"the fastest{what} first", times_ns),
        (f"the slowest{what} first", [-ns for ns in times_ns]),
    ]
    if len(set(limits)) > 1:
        subject = "the hosts" if keeps_hosts else "those"
        rankings.append((f"{subject} with the most memory first", [-limit for limit in limits]))
    for words, values in rankings:
        ranks = _ascending(values, hosts, keeps_hosts=keeps_hosts)
        if all(ranks != order.ranks for order in orders):
            orders.append(DeviceOrder(words=words, ranks=ranks))
    return tuple(orders)


def _differ_in_speed_alone(cluster: Cluster, options: PlanOptions) -> bool:
    """Returns whether the devices differ in speed, but not in kind, overlap of transfers, memory or constraints."""
    allowed = parse_constraints(options.constraints).allowed_layers(cluster)
    what_else = {
        (device.kind, device.overlaps_transfers, *of_rank)
        for device, *of_rank in zip(cluster.devices, options.limits(cluster), allowed, strict=True)
    }
    return len(what_else) == 1 < len({device.speed for device in cluster.devices})


def _ascending(values: Sequence[float], hosts: Sequence[str], *, keeps_hosts: bool) -> tuple[int, ...]:
    """Returns the ranks, ascending by value.

    With `keeps_hosts` the ranks of each host stay together, and hosts ascend by the mean of their ranks' values.
    """
    mean = {host: fmean(value for own, value in zip(hosts, values, strict=True) if own == host) for host in set(hosts)}
    first = {host: hosts.index(host) for host in mean}

    def key(rank: int) -> tuple[float, int, float]:
        host = hosts[rank]
        return (mean[host], first[host], values[rank]) if keeps_hosts else (values[rank], 0, 0.0)

    return tuple(sorted(range(len(hosts)), key=key))
