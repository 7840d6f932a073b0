"""Roots of the search tree: which devices, and orders of devices, a pipeline may have.

With few devices every choice is searched in any order; with many, the first devices of the cluster in its order.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

from bapipe.planner.branch_and_bound.devices import DeviceClass
from bapipe.planner.branch_and_bound.placements import (
    ClassCounts,
    ClassSequence,
    PlacementGraph,
    StagePlacement,
    positions_of_stages,
)
from bapipe.planner.branch_and_bound.problem import Root
from bapipe.planner.equal_groups import group_sizes
from bapipe.schedules import SCHEDULES

MAX_DEVICE_GROUPS = 3_000
"""Maximum number of pairs (devices of a stage, devices that remain after it) with which devices are taken in any order;
with more, they are taken in the cluster's order."""

MAX_DEVICE_ORDERS = 500
"""Maximum number of orders of the devices of one pipeline, for a schedule with several stages per device."""

MAX_CONSECUTIVE_COUNTS = 64
"""If devices are taken in the cluster's order, every number up to this one is tried, then powers of two."""


def allow_any_order(classes: Sequence[DeviceClass], max_devices: int) -> bool:
    """Returns whether the ways to choose devices are few enough for all orders of at most `max_devices` devices."""
    # The number of (devices of a stage, devices that remain after it).
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
    any_order: bool,
) -> list[Root]:
    """Returns the roots of a problem: every choice of devices, with the placements that its first stage can have.

    Args:
        work_ns: F and the backward of a micro-batch in all layers, at speed 1.
        num_stages: fixed if given.
        max_stages: how many stages the legal cuts allow.
        any_order: whether devices are taken in any order, or in the cluster's.
    """
    if num_stages is not None and num_stages > max_stages:
        return []
    num_microbatches = placements.num_microbatches
    # A replica beyond the number of micro-batches would have none to run.
    max_devices = max_stages * (num_microbatches if placements.replicas else 1)
    roots = []

    def add(used: ClassCounts, first: tuple[StagePlacement, ...], num_positions: int = 0) -> None:
        # All work at the speed of all devices together, less half a nanosecond for each time that is rounded.
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

    # Several stages per device: the order of the devices is the only choice, so each order is a root.
    if placements.schedule not in SCHEDULES:
        for devices, used in _device_orders(classes, max_stages, any_order):
            count = len(positions_of_stages(placements.schedule, len(devices)))
            if count in _allowed_stage_counts(num_stages, max_stages):
                add(used, placements.roots_multi_stage(devices), len(devices))
    # A root per number of devices of each class; its placements divide them among stages in every way.
    elif any_order:
        for used in product(*(range(len(cls.ranks) + 1) for cls in classes)):
            if 0 < sum(used) <= max_devices and (num_stages is None or sum(used) >= num_stages):
                add(used, placements.roots_any_order(used, num_stages))
    else:
        # Too many choices: the first devices of the cluster, consecutive ones for each stage.
        line = _classes_by_rank(classes)
        for count in _device_counts(len(line)):
            if count <= max_devices and (num_stages is None or count >= num_stages):
                add(_count_classes(line[:count], classes), placements.roots_in_order(line[:count], num_stages))
    return roots


def _allowed_stage_counts(num_stages: int | None, max_stages: int) -> range:
    return range(1, max_stages + 1) if num_stages is None else range(num_stages, min(num_stages, max_stages) + 1)


def _classes_by_rank(classes: Sequence[DeviceClass]) -> list[int]:
    """The class of every device, in the cluster's order. [ranks]"""
    return [c for _, c in sorted((rank, c) for c, cls in enumerate(classes) for rank in cls.ranks)]


def _count_classes(devices: Sequence[int], classes: Sequence[DeviceClass]) -> ClassCounts:
    return tuple(devices.count(c) for c in range(len(classes)))


def _device_counts(num_devices: int) -> list[int]:
    """The numbers of devices to try of many: any number up to `MAX_CONSECUTIVE_COUNTS`, then powers of two, and all."""
    return sorted({*range(1, min(num_devices, MAX_CONSECUTIVE_COUNTS) + 1), *group_sizes(num_devices)})


def _device_orders(
    classes: Sequence[DeviceClass], max_stages: int, any_order: bool
) -> list[tuple[ClassSequence, ClassCounts]]:
    """Orders of devices by class, and their counts, for schedules with several stages per device.

    All orders of 1 device, of 2 devices, ... as long as there are at most `MAX_DEVICE_ORDERS`; for more devices, and if
    not `any_order`, the cluster's order alone.
    """
    line = _classes_by_rank(classes)
    orders: list[tuple[ClassSequence, ClassCounts]] = []
    of_count: list[tuple[ClassSequence, ClassCounts]] = [((), (0,) * len(classes))]
    for count in range(1, min(len(line), max_stages // 2) + 1):
        # Each order of one device less is continued by every class that has a device left.
        if any_order and of_count:
            of_count = [
                ((*devices, c), (*used[:c], used[c] + 1, *used[c + 1 :]))
                for devices, used in of_count
                for c, cls in enumerate(classes)
                if used[c] < len(cls.ranks)
            ]
        if not any_order or len(of_count) > MAX_DEVICE_ORDERS:
            of_count = []
        orders += of_count or [(tuple(line[:count]), _count_classes(line[:count], classes))]
    return orders


def total_rate(used: Sequence[int], classes: Sequence[DeviceClass]) -> Fraction:
    """Returns the sum of the speeds of some devices, given as the number of each class."""
    # Exact rational numbers: a bound must not exceed its true value by rounding.
    speeds = (count * Fraction(str(cls.device.speed)) for count, cls in zip(used, classes, strict=True))
    return sum(speeds, start=Fraction(0))
