"""Roots of the search tree: the choices of devices, and orders of devices, that are searched.

If there are few devices, these are all choices in any order; else the first devices of some orders (`device_orders`).
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product

from bapipe.planner.branch_and_bound.problem import Root
from bapipe.planner.results.searched_space import GIVEN_ORDER
from bapipe.planner.stages.devices import DeviceClass
from bapipe.planner.stages.placements import (
    ClassCounts,
    ClassSequence,
    PlacementGraph,
    StagePlacement,
    num_stages_on,
)
from bapipe.schedules import SCHEDULES
from bapipe.units import decimal

MAX_DEVICE_GROUPS = 3_000
"""Devices are taken in any order if there are at most this many pairs (devices of a stage, devices that remain after
it), counted by class."""

MAX_DEVICE_ORDERS = 500
"""Maximum number of orders of a number of devices that are all tried, if devices have several stages."""

SOME_ORDERS = f"{GIVEN_ORDER}, those of a host together, the fastest first, or those with the most memory first"
"""The orders that are tried otherwise, as certificates, and so plan files, describe them."""


def allow_any_order(classes: Sequence[DeviceClass], max_devices: int) -> bool:
    """Returns whether plans on at most `max_devices` devices are few enough to take devices in any order."""
    # The number of pairs (devices of a stage, devices that remain after it).
    num_groups = 1
    for cls in classes:
        n = min(len(cls.ranks), max_devices)
        # Pairs (taken, remaining) with taken + remaining <= n.
        num_groups *= (n + 1) * (n + 2) // 2
    return num_groups <= MAX_DEVICE_GROUPS


def make_roots(
    placements: PlacementGraph,
    classes: Sequence[DeviceClass],
    work_ns: int,
    *,
    num_stages: int | None,
    max_stages: int,
    lines: Sequence[ClassSequence],
) -> list[Root]:
    """Returns the roots of a problem, one for each choice of devices that is searched.

    Args:
        work_ns: a lower bound on F and the backward of a micro-batch in all layers, at speed 1.
        num_stages: the number of stages; None if it is free.
        max_stages: the number of stages that the legal cuts allow.
        lines: orders of all devices, by class, of which pipelines take the first ones; () to take them in any order.
    """
    if num_stages is not None and num_stages > max_stages:
        return []
    if max_stages == 1:
        num_stages = 1  # else every way to divide the devices among more stages, all of them impossible, is made
    num_microbatches = placements.num_microbatches
    # A replica beyond the number of micro-batches would have none to run.
    max_devices = max_stages * (num_microbatches if placements.replicas else 1)
    roots = []
    for used, first, num_positions in _choices(placements, classes, num_stages, max_stages, max_devices, lines):
        # All work at the speed of all devices together, less half a nanosecond for each time that may be rounded.
        slack_ns = 3 * num_microbatches * max(sum(used), max_stages)
        bound_ns = max(0, int(num_microbatches * work_ns / total_rate(used, classes)) - slack_ns)
        if first:
            roots.append(
                Root(
                    num_devices=sum(used),
                    num_of_class=used,
                    first_placements=first,
                    bound_ns=bound_ns,
                    num_positions=num_positions,
                )
            )
    return roots


def _choices(
    placements: PlacementGraph,
    classes: Sequence[DeviceClass],
    num_stages: int | None,
    max_stages: int,
    max_devices: int,
    lines: Sequence[ClassSequence],
) -> Iterator[tuple[ClassCounts, tuple[StagePlacement, ...], int]]:
    """Yields `num_of_class`, `first_placements` and `num_positions` of each root; arguments as in `make_roots`."""
    # With several stages per device, the order of the devices fixes the placements: a root per order.
    if placements.schedule not in SCHEDULES:
        for devices, used in _device_orders(classes, max_stages, lines):
            count = num_stages_on(placements.schedule, len(devices))
            if count in _allowed_stage_counts(num_stages, max_stages):
                yield used, placements.roots_multi_stage(devices), len(devices)
    # Any order: a root per choice of devices, whose placements divide them among stages in every way.
    elif not lines:
        for used in product(*(range(len(cls.ranks) + 1) for cls in classes)):
            if 0 < sum(used) <= max_devices and (num_stages is None or sum(used) >= num_stages):
                yield used, placements.roots_any_order(used, num_stages), 0
    else:
        # Too many choices: a root for the first devices of each order; each stage takes consecutive ones.
        for count in range(num_stages or 1, min(len(lines[0]), max_devices) + 1):
            for devices in _first_devices(lines, count):
                yield _count_classes(devices, classes), placements.roots_in_order(devices, num_stages), 0


def _allowed_stage_counts(num_stages: int | None, max_stages: int) -> range:
    """Returns the numbers of stages that are asked for and possible."""
    return range(1, max_stages + 1) if num_stages is None else range(num_stages, min(num_stages, max_stages) + 1)


def _classes_by_rank(classes: Sequence[DeviceClass]) -> list[int]:
    """Returns the class of every device, in the cluster's order. [ranks]"""
    return [c for _, c in sorted((rank, c) for c, cls in enumerate(classes) for rank in cls.ranks)]


def _count_classes(devices: ClassSequence, classes: Sequence[DeviceClass]) -> ClassCounts:
    """Returns how many of some devices each class has. [classes]"""
    return tuple(devices.count(c) for c in range(len(classes)))


def num_in_any_order(classes: Sequence[DeviceClass]) -> int:
    """Returns the largest number of devices of which all orders are tried, if devices have several stages."""
    return max((count for count, orders in _all_orders(classes) if orders), default=0)


def _device_orders(
    classes: Sequence[DeviceClass], max_stages: int, lines: Sequence[ClassSequence]
) -> list[tuple[ClassSequence, ClassCounts]]:
    """Returns the orders of devices, by class, that are tried with several stages per device; with counts by class.

    If `lines` are given, only the first 1, 2, ... devices of these. Else all orders of 1, 2, ... devices as long as
    there are at most `MAX_DEVICE_ORDERS`, and for larger numbers the first devices of `SOME_ORDERS`.
    """
    orders: list[tuple[ClassSequence, ClassCounts]] = []
    for count, all_of_count in _all_orders(classes):
        if count > max_stages // 2:
            break
        chosen = all_of_count if all_of_count and not lines else _first_devices(lines or _some_orders(classes), count)
        orders += [(devices, _count_classes(devices, classes)) for devices in chosen]
    return orders


def _first_devices(lines: Sequence[ClassSequence], count: int) -> list[ClassSequence]:
    """Returns the first `count` devices of some orders, by class, without duplicates."""
    return list(dict.fromkeys(line[:count] for line in lines))


def _all_orders(classes: Sequence[DeviceClass]) -> Iterator[tuple[int, list[ClassSequence]]]:
    """Yields (n, all orders of n devices by class) for n = 1, 2, ...; [] if there are more than `MAX_DEVICE_ORDERS`.

    Hosts with equal devices are used in their given order, because exchanging them changes no step time.
    """
    alike = _alike_hosts(classes)
    of_count: list[ClassSequence] = [()]
    for count in range(1, sum(len(cls.ranks) for cls in classes) + 1):
        # Each order of one device less is extended by a device of every class that has one left.
        of_count = [
            (*devices, c)
            for devices in of_count
            for c, cls in enumerate(classes)
            if devices.count(c) < len(cls.ranks)
            and not _comes_later(cls.host, {classes[used].host for used in devices}, alike)
        ]
        of_count = of_count if len(of_count) <= MAX_DEVICE_ORDERS else []
        yield count, of_count


def _alike_hosts(classes: Sequence[DeviceClass]) -> dict[str, tuple[str, ...]]:
    """Returns for each host on which links depend the hosts with equal devices, with itself."""
    devices_of: dict[str, list[tuple[int, int]]] = {}
    for cls in classes:
        if cls.host is not None:
            devices_of.setdefault(cls.host, []).append((cls.type_number, len(cls.ranks)))
    return {
        host: tuple(other for other in devices_of if sorted(devices_of[other]) == sorted(devices))
        for host, devices in devices_of.items()
    }


def _comes_later(host: str | None, used: Container[str | None], alike: Mapping[str, Sequence[str]]) -> bool:
    """Returns whether a host is unused, and another one with equal devices must be used before it."""
    return host is not None and host not in used and next(other for other in alike[host] if other not in used) != host


def _some_orders(classes: Sequence[DeviceClass]) -> list[ClassSequence]:
    """Returns the classes of all devices in the orders of `SOME_ORDERS`."""
    by_rank = _classes_by_rank(classes)
    # A class without a host counts as a host here.
    hosts = [c if cls.host is None else cls.host for c, cls in enumerate(classes)]
    first = {host: by_rank.index(c) for c, host in reversed([*enumerate(hosts)])}
    orders = [by_rank, sorted(by_rank, key=lambda c: first[hosts[c]]), sorted(by_rank)]
    orders.append(sorted(by_rank, key=lambda c: -classes[c].limit_bytes))
    return [tuple(order) for order in orders]


def total_rate(used: Sequence[int], classes: Sequence[DeviceClass]) -> Fraction:
    """Returns the sum of the speeds of some devices, given as the number of each class. [classes]"""
    # In exact rational numbers, because rounding must not make a bound larger than it is.
    speeds = (count * decimal(cls.device.speed) for count, cls in zip(used, classes, strict=True))
    return sum(speeds, start=Fraction(0))
