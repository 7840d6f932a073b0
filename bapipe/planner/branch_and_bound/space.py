"""The search space: one problem per schedule and micro-batch size, each with its roots (choices of devices)."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.branch_and_bound.chain import Chain
from bapipe.planner.branch_and_bound.devices import ClassLinks, ClassSymmetry, DeviceClass, device_classes
from bapipe.planner.branch_and_bound.intervals import IntArray, IntervalIndex, IntervalMemory, IntervalTimes
from bapipe.planner.branch_and_bound.lower_bound import LowerBound
from bapipe.planner.branch_and_bound.placements import ClassCounts, ClassSequence, PlacementGraph, StagePlacement
from bapipe.planner.branch_and_bound.problem import Problem, Root
from bapipe.planner.branch_and_bound.stage_bound import BOUND_NAMES
from bapipe.planner.branch_and_bound.stage_candidates import StageCostTable
from bapipe.planner.branch_and_bound.stage_schedule import runs_forwards_first
from bapipe.planner.constraints import Constraints, check_constraints, parse_constraints
from bapipe.planner.options import PlanOptions
from bapipe.planner.validation import microbatch_sizes, named_schedules
from bapipe.schedules import SCHEDULES

MAX_DEVICE_GROUPS = 3_000
"""Up to so many ways to choose the devices of a stage and those that remain, devices are taken in any order; with more,
in the cluster's order."""

MAX_PERMUTED_DEVICES = 5
"""Up to so many devices in a cluster, those of one stage take their micro-batches in any order; with more, the fastest
first."""

MAX_DEVICE_ORDERS = 500
"""Maximum number of orders of the devices of one pipeline, for a schedule with several stages per device."""

SYNC_CLASS_DIVISORS = (20, 5)
"""Thresholds between the sync classes: an ideal step time divided by these; see `cost_to_go.py`."""

MAX_CONSECUTIVE_COUNTS = 16
"""If devices are taken in the cluster's order, every number up to this one is tried, then powers of two."""

PROBE_STAGES, PROBE_MICROBATCHES = 2, 16
"""Size of the table that tells whether a schedule runs all forwards first: more micro-batches than are in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The problems to solve, and what a certificate says of them.

    Attributes:
        order: how devices are given to stages, in words.
        stage_counts: the numbers of stages that devices, layers and schedules allow, ascending.
        device_counts: the numbers of devices tried, ascending.
    """

    problems: tuple[Problem, ...]
    order: str
    stage_counts: tuple[int, ...]
    device_counts: tuple[int, ...]


def search_space(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> SearchSpace:
    """Returns the search space of some options.

    Raises:
        BapipeError: constraints that cannot be met, or a number of stages that is impossible.
    """
    constraints = parse_constraints(options.constraints)
    check_constraints(constraints, next(iter(profiles.values())), cluster)
    space = build_space(
        profiles,
        cluster,
        minibatch_size=options.minibatch_size,
        sizes=microbatch_sizes(profiles, cluster, options),
        schedules=named_schedules(options),
        limits=options.limits(cluster),
        num_stages=options.num_stages,
        replicas=options.replicas,
        recompute=options.recompute,
        constraints=constraints,
    )
    if not any(problem.roots for problem in space.problems):
        asked = "any number of" if options.num_stages is None else options.num_stages
        raise BapipeError(
            f"{asked} stages asked for; {len(cluster.devices)} devices, {_num_layers(profiles)} layers and "
            f"{', '.join(named_schedules(options))} allow {', '.join(map(str, space.stage_counts)) or 'none'}"
            f"{f' where {options.in_words}' if options.constraints else ''}"
        )
    return space


def build_space(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    *,
    minibatch_size: int,
    sizes: Sequence[int],
    schedules: Sequence[str],
    limits: Sequence[int],
    num_stages: int | None = None,
    replicas: bool = True,
    recompute: bool = True,
    constraints: Constraints | None = None,
    enabled_bounds: frozenset[str] = BOUND_NAMES,
) -> SearchSpace:
    """Returns every problem of a space. Placements and cost-to-go are computed when a search asks for them.

    Args:
        sizes: micro-batch sizes that divide the mini-batch.
        limits: the memory limit of each rank, in bytes.
        enabled_bounds: names of the lower bounds to use; all but in experiments.
    """
    constraints = constraints or Constraints()
    classes = device_classes(cluster, limits, constraints.allowed_layers(cluster), _ns_per_sample(profiles, cluster))
    links = ClassLinks(cluster, classes)
    symmetry = ClassSymmetry(types=tuple(cls.type_number for cls in classes), hosts=tuple(cls.host for cls in classes))
    kinds = {cls.device.kind: profiles[cls.device.kind] for cls in classes}
    intervals: IntervalIndex | None = None
    # A stage has at most one replica per micro-batch, and there are at most as many stages as layers.
    max_useful_devices = min(len(cluster.devices), minibatch_size * _num_layers(profiles))
    any_order = _num_device_groups(classes, max_useful_devices) <= MAX_DEVICE_GROUPS
    problems = []
    # Problems of one micro-batch size share chains and costs; the intervals serve all sizes, as legal cuts do not
    # depend on the size.
    for size in reversed(sizes):
        chains = _chains(kinds, classes, size)
        intervals = intervals or IntervalIndex(constraints.allowed_cuts(next(iter(kinds.values())), chains[0].legal))
        costs = _stage_costs(kinds, classes, links, intervals, size, chains, recompute, constraints)
        num_microbatches = minibatch_size // size
        total_rate = _rate([len(cls.ranks) for cls in classes], classes)
        # All work spread evenly over all devices: the scale for the thresholds between sync classes.
        ideal_step_ns = int(num_microbatches * _min_work_ns(kinds, size) / total_rate)
        for schedule in schedules:
            placements = PlacementGraph(
                schedule,
                num_microbatches,
                symmetry,
                replicas=replicas,
                permute_replicas=len(cluster.devices) <= MAX_PERMUTED_DEVICES,
            )
            lower_bound = LowerBound(
                costs,
                num_microbatches,
                forwards_first=_runs_forwards_first(schedule),
                sync_limits_ns=[ideal_step_ns // divisor for divisor in SYNC_CLASS_DIVISORS],
                enabled=enabled_bounds,
            )
            problems.append(
                Problem(
                    cluster=cluster,
                    classes=classes,
                    chains=chains,
                    schedule=schedule,
                    microbatch_size=size,
                    num_microbatches=num_microbatches,
                    placements=placements,
                    lower_bound=lower_bound,
                    roots=_roots(placements, kinds, classes, size, num_stages, len(intervals.cuts) - 1, any_order),
                )
            )
    max_stages = 0 if intervals is None else intervals.num_boundaries - 1
    return SearchSpace(
        problems=tuple(problems),
        order=_order_text(any_order, cluster, classes),
        stage_counts=_stage_counts(problems, len(cluster.devices), max_stages),
        device_counts=tuple(sorted({root.num_devices for problem in problems for root in problem.roots})),
    )


def _runs_forwards_first(schedule: str) -> bool:
    """Whether a schedule with one stage per device runs all F of a device before its first backward, as GPipe does."""
    if schedule not in SCHEDULES:
        return False
    return all(map(runs_forwards_first, SCHEDULES[schedule](PROBE_STAGES, PROBE_MICROBATCHES).order))


def _stage_counts(problems: Sequence[Problem], num_devices: int, max_stages: int) -> tuple[int, ...]:
    stage_counts: set[int] = set()
    for placements in {problem.schedule: problem.placements for problem in problems}.values():
        # One stage per device, any number of devices; or several stages per device, in numbers that the table fixes.
        if placements.schedule in SCHEDULES:
            stage_counts |= set(range(1, min(num_devices, max_stages) + 1))
        else:
            device_counts = range(1, min(num_devices, max_stages // 2) + 1)
            stage_counts |= {
                count for count in (placements.table(n).num_stages for n in device_counts) if count <= max_stages
            }
    return tuple(sorted(stage_counts))


def _order_text(any_order: bool, cluster: Cluster, classes: Sequence[DeviceClass]) -> str:
    # These words are part of the certificate in plan files.
    if len(cluster.devices) == 1:
        return ""
    if not any_order:
        return ", in the cluster's order, of too many choices only the first devices"
    if len(classes) == 1 or len(cluster.devices) <= MAX_PERMUTED_DEVICES:
        return ", in any order"
    return ", in any order, those of one stage the fastest first"


def _roots(
    placements: PlacementGraph,
    kinds: Mapping[str, ModelProfile],
    classes: Sequence[DeviceClass],
    size: int,
    num_stages: int | None,
    max_stages: int,
    any_order: bool,
) -> list[Root]:
    """The roots of a problem: every choice of devices, with the placements that its first stage can have."""
    if num_stages is not None and num_stages > max_stages:
        return []
    num_microbatches = placements.num_microbatches
    # A replica beyond the number of micro-batches would have none to run.
    max_devices = max_stages * (num_microbatches if placements.replicas else 1)
    work_ns = _min_work_ns(kinds, size)
    roots = []

    def add(used: ClassCounts, first: tuple[StagePlacement, ...], num_positions: int = 0) -> None:
        # All work at the speed of all devices together, less half a nanosecond for each time that is rounded.
        slack_ns = 3 * num_microbatches * max(sum(used), max_stages)
        bound_ns = max(0, int(num_microbatches * work_ns / _rate(used, classes)) - slack_ns)
        if first:
            roots.append(
                Root(num_devices=sum(used), first_placements=first, bound_ns=bound_ns, num_positions=num_positions)
            )

    # Several stages per device: the order of the devices is the only choice, so each order is a root.
    if placements.schedule not in SCHEDULES:
        for devices, used in _device_orders(classes, max_stages, any_order):
            if placements.table(len(devices)).num_stages in _allowed_stage_counts(num_stages, max_stages):
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


def _rate(used: Sequence[int], classes: Sequence[DeviceClass]) -> Fraction:
    """The sum of the speeds of so many devices of each class."""
    # Exact rational numbers: a bound must not exceed its true value by rounding.
    speeds = (count * Fraction(str(cls.device.speed)) for count, cls in zip(used, classes, strict=True))
    return sum(speeds, start=Fraction(0))


def _allowed_stage_counts(num_stages: int | None, max_stages: int) -> range:
    return range(1, max_stages + 1) if num_stages is None else range(num_stages, min(num_stages, max_stages) + 1)


def _classes_by_rank(classes: Sequence[DeviceClass]) -> list[int]:
    """The class of every device, in the cluster's order. [ranks]"""
    return [c for _, c in sorted((rank, c) for c, cls in enumerate(classes) for rank in cls.ranks)]


def _count_classes(devices: Sequence[int], classes: Sequence[DeviceClass]) -> ClassCounts:
    return tuple(devices.count(c) for c in range(len(classes)))


def _device_counts(num_devices: int) -> list[int]:
    """The numbers of devices to try of many: any number up to `MAX_CONSECUTIVE_COUNTS`, then powers of two, and all."""
    powers = [2**n for n in range(num_devices.bit_length())]
    return sorted({*range(1, min(num_devices, MAX_CONSECUTIVE_COUNTS) + 1), *powers, num_devices})


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


def _num_device_groups(classes: Sequence[DeviceClass], max_devices: int) -> int:
    """The number of (devices of a stage, devices that remain after it): per class, pairs with a sum of at most n."""
    num_groups = 1
    for cls in classes:
        n = min(len(cls.ranks), max_devices)
        # Pairs (taken, remaining) with taken + remaining <= n.
        num_groups *= (n + 1) * (n + 2) // 2
    return num_groups


def _num_layers(profiles: Mapping[str, ModelProfile]) -> int:
    return len(next(iter(profiles.values())).layers)


def _ns_per_sample(profiles: Mapping[str, ModelProfile], cluster: Cluster) -> list[float]:
    """F and B of all layers per sample, at the largest measured micro-batch size. [ranks]"""
    at_speed_1 = {
        kind: sum(m.forward_ns + m.whole_backward_ns for m in profile.at(profile.microbatch_sizes[-1]))
        / profile.microbatch_sizes[-1]
        for kind, profile in profiles.items()
    }
    return [at_speed_1[device.kind] / device.speed for device in cluster.devices]


def _min_work_ns(kinds: Mapping[str, ModelProfile], size: int) -> int:
    """F and B, or I and W, of all layers, each on the kind of device that is fastest for it at speed 1."""
    rows = [
        [m.forward_ns + min(m.whole_backward_ns, m.input_grad_ns + m.weight_grad_ns) for m in profile.at(size)]
        for profile in kinds.values()
    ]
    return sum(min(times) for times in zip(*rows, strict=True))


def _chains(kinds: Mapping[str, ModelProfile], classes: Sequence[DeviceClass], size: int) -> list[Chain]:
    """The chain as each class runs it; classes of one kind and speed share it. [classes]"""
    chains = {
        (cls.device.kind, cls.device.speed): Chain(kinds[cls.device.kind], size, cls.device.speed) for cls in classes
    }
    return [chains[cls.device.kind, cls.device.speed] for cls in classes]


def _stage_costs(
    kinds: Mapping[str, ModelProfile],
    classes: Sequence[DeviceClass],
    links: ClassLinks,
    intervals: IntervalIndex,
    size: int,
    chains: Sequence[Chain],
    recompute: bool,
    constraints: Constraints,
) -> StageCostTable:
    # Kinds of devices may disagree about the bytes at a cut: memory takes the maximum, transfers the minimum.
    max_bytes = (
        [max(values) for values in zip(*(chain.send_bytes for chain in chains), strict=True)],
        [max(values) for values in zip(*(chain.grad_bytes for chain in chains), strict=True)],
    )
    times: dict[Hashable, IntervalTimes] = {}
    memory: dict[str, IntervalMemory] = {}
    for cls in classes:
        kind, speed = cls.device.kind, cls.device.speed
        # Bytes depend on the kind of device, times also on its speed.
        if kind not in memory:
            memory[kind] = IntervalMemory(intervals, kinds[kind], size, max_bytes)
        if (kind, speed) not in times:
            times[kind, speed] = IntervalTimes(intervals, kinds[kind], size, speed)
    return StageCostTable(
        intervals,
        classes,
        links,
        [times[cls.device.kind, cls.device.speed] for cls in classes],
        [memory[cls.device.kind] for cls in classes],
        min_send_bytes=_min_at_boundaries([chain.send_bytes for chain in chains], intervals),
        min_grad_bytes=_min_at_boundaries([chain.grad_bytes for chain in chains], intervals),
        recompute=recompute,
        forbidden=constraints.forbidden_intervals(next(iter(kinds.values())), intervals, classes),
    )


def _min_at_boundaries(cut_bytes: Sequence[Sequence[int]], intervals: IntervalIndex) -> IntArray:
    """The minimum over the chains of the bytes at every boundary. [chains, layers + 1] -> [boundaries]"""
    return np.array([min(values[cut] for values in cut_bytes) for cut in intervals.cuts], dtype=np.int64)
