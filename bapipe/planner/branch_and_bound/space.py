"""The space to search: every schedule, micro-batch size and choice of devices, as problems."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.branch_and_bound.chain import Chain
from bapipe.planner.branch_and_bound.devices import DeviceClass, Links, classes_of
from bapipe.planner.branch_and_bound.intervals import IntArray, IntervalIndex, IntervalMemory, IntervalTimes
from bapipe.planner.branch_and_bound.lower_bound import LowerBound
from bapipe.planner.branch_and_bound.placements import ClassCounts, PlacementGraph
from bapipe.planner.branch_and_bound.problem import Problem, Root
from bapipe.planner.branch_and_bound.stage_candidates import StageCostTable
from bapipe.planner.constraints import Constraints, check_constraints, parse_constraints
from bapipe.planner.options import PlanOptions
from bapipe.planner.validation import microbatch_sizes, named_schedules
from bapipe.schedules import SCHEDULES

MAX_DEVICE_GROUPS = 3_000
"""Most ways to give a stage some of the devices that are left; with more, devices are taken in the cluster's order."""

MAX_PERMUTED_DEVICES = 5
"""Most devices of a cluster where those of one stage take their micro-batches in any order; else the fastest first."""

MAX_DEVICE_ORDERS = 500
"""Most orders of devices of one pipeline for a schedule with several stages a device."""

SYNC_CLASS_SHARES = (20, 5)
"""What is to come is told apart by the largest time after a stage's last backward: as parts of an ideal step."""

MAX_DEVICE_COUNTS = 16
"""Most devices of which any number is looked at, where they are taken in the cluster's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The problems to solve, and what a certificate says of them.

    Attributes:
        order: how devices are given to stages, in words.
        stage_counts: the numbers of stages that devices, layers and schedules allow, ascending.
        device_counts: the numbers of devices looked at, ascending.
    """

    problems: tuple[Problem, ...]
    order: str
    stage_counts: tuple[int, ...]
    device_counts: tuple[int, ...]


def search_space(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> SearchSpace:
    """Returns the problems to solve.

    Raises:
        BapipeError: constraints that cannot be met, or a number of stages that there cannot be.
    """
    rules = parse_constraints(options.constraints)
    check_constraints(rules, next(iter(profiles.values())), cluster)
    made = build_space(
        profiles,
        cluster,
        minibatch_size=options.minibatch_size,
        sizes=microbatch_sizes(profiles, cluster, options),
        schedules=named_schedules(options),
        limits=options.limits(cluster),
        num_stages=options.num_stages,
        replicas=options.replicas,
        recompute=options.recompute,
        constraints=rules,
    )
    if not any(problem.starts for problem in made.problems):
        asked = "any number of" if options.num_stages is None else options.num_stages
        num_layers = len(next(iter(profiles.values())).layers)
        raise BapipeError(
            f"{asked} stages asked for; {len(cluster.devices)} devices, {num_layers} layers and "
            f"{', '.join(named_schedules(options))} allow {', '.join(map(str, made.stage_counts)) or 'none'}"
            f"{f' where {options.in_words}' if options.constraints else ''}"
        )
    return made


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
) -> SearchSpace:
    """Returns every problem of the space. Nothing of size is made before a search asks for it."""
    rules = constraints or Constraints()
    classes = classes_of(cluster, limits, rules.apart(cluster), _pace(profiles, cluster))
    links = Links(cluster, classes)
    kinds = {own.device.kind: profiles[own.device.kind] for own in classes}
    grid: IntervalIndex | None = None
    problems = []
    free = _num_groups(classes, min(len(cluster.devices), minibatch_size * len(_layers(profiles)))) <= MAX_DEVICE_GROUPS
    for size in reversed(sizes):
        chains = _chains(kinds, classes, size)
        grid = grid or IntervalIndex(rules.cuts(next(iter(kinds.values())), chains[0].legal))
        pieces = _pieces(kinds, classes, links, grid, size, chains, recompute, rules)
        send, grad = _least_alive(chains, grid)
        num = minibatch_size // size
        ideal_ns = int(num * _least_work_ns(kinds, size) / _rate([len(own.ranks) for own in classes], classes))
        limits_ns = [ideal_ns // part for part in SYNC_CLASS_SHARES]
        for schedule in schedules:
            twins = [own.twin for own in classes]
            slots = PlacementGraph(
                schedule, num, twins, replicas=replicas, arranged=len(cluster.devices) <= MAX_PERMUTED_DEVICES
            )
            flow_shop = schedule in ("gpipe", "gpipe-2bp")  # all F of a device before its first B
            problems.append(
                Problem(
                    cluster=cluster,
                    classes=classes,
                    chains=chains,
                    schedule=schedule,
                    microbatch_size=size,
                    num_microbatches=num,
                    slots=slots,
                    bounds=LowerBound(pieces, num, send, grad, gpipe=flow_shop, limits_ns=limits_ns),
                    starts=_starts(slots, kinds, classes, size, num_stages, grid.num_places - 1, free),
                )
            )
    most_stages = 0 if grid is None else grid.num_places - 1
    return SearchSpace(
        problems=tuple(problems),
        order=_order(free, cluster, classes),
        stage_counts=_stage_counts(problems, len(cluster.devices), most_stages),
        device_counts=tuple(sorted({start.devices for problem in problems for start in problem.starts})),
    )


def _stage_counts(problems: Sequence[Problem], num_devices: int, most_stages: int) -> tuple[int, ...]:
    found: set[int] = set()
    for slots in {problem.schedule: problem.slots for problem in problems}.values():
        if slots.schedule in SCHEDULES:
            found |= set(range(1, min(num_devices, most_stages) + 1))
        else:
            counts = (slots.table(count).num_stages for count in range(1, min(num_devices, most_stages // 2) + 1))
            found |= {count for count in counts if count <= most_stages}
    return tuple(sorted(found))


def _order(free: bool, cluster: Cluster, classes: Sequence[DeviceClass]) -> str:
    if len(cluster.devices) == 1:
        return ""
    if not free:
        return ", in the cluster's order, of too many choices only the first devices"
    if len(classes) == 1 or len(cluster.devices) <= MAX_PERMUTED_DEVICES:
        return ", in any order"
    return ", in any order, those of one stage the fastest first"


def _starts(
    slots: PlacementGraph,
    kinds: Mapping[str, ModelProfile],
    classes: Sequence[DeviceClass],
    size: int,
    num_stages: int | None,
    most_stages: int,
    free: bool,
) -> list[Root]:
    if num_stages is not None and num_stages > most_stages:
        return []
    most = most_stages * (slots.num_microbatches if slots.replicas else 1)
    work = _least_work_ns(kinds, size)
    starts = []

    def add(used: ClassCounts, first: "tuple[object, ...]", num_places: int = 0) -> None:
        rate = _rate(used, classes)
        slack = 3 * slots.num_microbatches * max(sum(used), most_stages)  # times of stages are rounded
        least_ns = max(0, int(slots.num_microbatches * work / rate) - slack)
        starts.append(Root(devices=sum(used), first=first, least_ns=least_ns, num_places=num_places))  # type: ignore[arg-type]

    if slots.schedule not in SCHEDULES:
        for word, used in _words(classes, most_stages, free):
            if slots.table(len(word)).num_stages in _allowed(num_stages, most_stages):
                add(used, slots.looped(word), len(word))
    elif free:
        for used in product(*(range(len(own.ranks) + 1) for own in classes)):
            if 0 < sum(used) <= most and (num_stages is None or sum(used) >= num_stages):
                add(used, slots.free(used, num_stages))
    else:
        line = _line(classes)
        for count in _counts(len(line)):
            if count <= most and (num_stages is None or count >= num_stages):
                add(_used(line[:count], classes), slots.in_order(line[:count], num_stages))
    return [start for start in starts if start.first]


def _rate(used: Sequence[int], classes: Sequence[DeviceClass]) -> Fraction:
    """The speeds of so many devices of each class, added up."""
    speeds = (count * Fraction(str(own.device.speed)) for count, own in zip(used, classes, strict=True))
    return sum(speeds, start=Fraction(0))


def _allowed(num_stages: int | None, most: int) -> range:
    return range(1, most + 1) if num_stages is None else range(num_stages, min(num_stages, most) + 1)


def _line(classes: Sequence[DeviceClass]) -> list[int]:
    """The class of every device, in the cluster's order."""
    return [c for _, c in sorted((rank, c) for c, own in enumerate(classes) for rank in own.ranks)]


def _used(line: Sequence[int], classes: Sequence[DeviceClass]) -> ClassCounts:
    return tuple(line.count(c) for c in range(len(classes)))


def _counts(num_devices: int) -> list[int]:
    """How many of many devices to look at: any number up to some, and then powers of two and all."""
    powers = [2**n for n in range(num_devices.bit_length())]
    return sorted({*range(1, min(num_devices, MAX_DEVICE_COUNTS) + 1), *powers, num_devices})


def _words(classes: Sequence[DeviceClass], most_stages: int, free: bool) -> list[tuple[tuple[int, ...], ClassCounts]]:
    """Devices in a row, by class, for schedules with several stages a device: in every order, or the cluster's."""
    line = _line(classes)
    found: list[tuple[tuple[int, ...], ClassCounts]] = []
    words: list[tuple[tuple[int, ...], ClassCounts]] = [((), (0,) * len(classes))]
    for count in range(1, min(len(line), most_stages // 2) + 1):
        if free and words:
            words = [
                ((*word, c), (*used[:c], used[c] + 1, *used[c + 1 :]))
                for word, used in words
                for c, own in enumerate(classes)
                if used[c] < len(own.ranks)
            ]
        if not free or len(words) > MAX_DEVICE_ORDERS:
            words = []
        found += words or [(tuple(line[:count]), _used(line[:count], classes))]
    return found


def _num_groups(classes: Sequence[DeviceClass], most: int) -> int:
    num = 1
    for own in classes:
        have = min(len(own.ranks), most)
        num *= (have + 1) * (have + 2) // 2
    return num


def _layers(profiles: Mapping[str, ModelProfile]) -> Sequence[object]:
    return next(iter(profiles.values())).layers


def _pace(profiles: Mapping[str, ModelProfile], cluster: Cluster) -> list[float]:
    whole = {
        kind: sum(m.forward_ns + m.whole_backward_ns for m in profile.at(profile.microbatch_sizes[-1]))
        / profile.microbatch_sizes[-1]
        for kind, profile in profiles.items()
    }
    return [whole[device.kind] / device.speed for device in cluster.devices]


def _least_work_ns(kinds: Mapping[str, ModelProfile], size: int) -> int:
    """F and B, or I and W, of all layers, each on the kind of device that is fastest at speed 1."""
    rows = [
        [m.forward_ns + min(m.whole_backward_ns, m.input_grad_ns + m.weight_grad_ns) for m in profile.at(size)]
        for profile in kinds.values()
    ]
    return sum(min(times) for times in zip(*rows, strict=True))


def _chains(kinds: Mapping[str, ModelProfile], classes: Sequence[DeviceClass], size: int) -> list[Chain]:
    made = {
        (own.device.kind, own.device.speed): Chain(kinds[own.device.kind], size, own.device.speed) for own in classes
    }
    return [made[own.device.kind, own.device.speed] for own in classes]


def _pieces(
    kinds: Mapping[str, ModelProfile],
    classes: Sequence[DeviceClass],
    links: Links,
    grid: IntervalIndex,
    size: int,
    chains: Sequence[Chain],
    recompute: bool,
    rules: Constraints,
) -> StageCostTable:
    alive = [
        [max(values) for values in zip(*(chain.send_bytes for chain in chains), strict=True)],
        [max(values) for values in zip(*(chain.grad_bytes for chain in chains), strict=True)],
    ]
    times: dict[Hashable, IntervalTimes] = {}
    sizes: dict[str, IntervalMemory] = {}
    for own in classes:
        kind, speed = own.device.kind, own.device.speed
        if kind not in sizes:
            sizes[kind] = IntervalMemory(grid, kinds[kind], size, alive)
        if (kind, speed) not in times:
            times[kind, speed] = IntervalTimes(grid, kinds[kind], size, speed)
    return StageCostTable(
        grid,
        classes,
        links,
        [times[own.device.kind, own.device.speed] for own in classes],
        [sizes[own.device.kind] for own in classes],
        recompute=recompute,
        mask=rules.mask(next(iter(kinds.values())), grid, classes),
    )


def _least_alive(chains: Sequence[Chain], grid: IntervalIndex) -> tuple[IntArray, IntArray]:
    """The bytes of activations and gradients at every place of the grid, on the kind of device that has least."""
    send = [min(chain.send_bytes[cut] for chain in chains) for cut in grid.cuts]
    grad = [min(chain.grad_bytes[cut] for chain in chains) for cut in grid.cuts]
    return np.array(send, dtype=np.int64), np.array(grad, dtype=np.int64)
