"""The search space: one problem per schedule and micro-batch size, each with its roots (choices of devices)."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.branch_and_bound.chain import Chain
from bapipe.planner.branch_and_bound.cut_transfers import CutTransfers
from bapipe.planner.branch_and_bound.devices import ClassLinks, ClassSymmetry, DeviceClass, device_classes
from bapipe.planner.branch_and_bound.interval_memory import IntervalMemory
from bapipe.planner.branch_and_bound.interval_times import IntervalTimes
from bapipe.planner.branch_and_bound.intervals import MAX_TIME, IntArray, IntervalIndex
from bapipe.planner.branch_and_bound.lower_bound import LowerBound
from bapipe.planner.branch_and_bound.placements import PlacementGraph, positions_of_stages
from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.branch_and_bound.recomputation import LayerChoice, Recomputation, RecomputationBound
from bapipe.planner.branch_and_bound.roots import allow_any_order, make_roots, total_rate
from bapipe.planner.branch_and_bound.stage_bound import BOUND_NAMES
from bapipe.planner.branch_and_bound.stage_candidates import StageCostTable
from bapipe.planner.branch_and_bound.stage_memory import ForbiddenIntervals, StageMemory
from bapipe.planner.branch_and_bound.stage_schedule import runs_forwards_first
from bapipe.planner.constraints import check_constraints, parse_constraints
from bapipe.planner.deadline import UNLIMITED, Deadline
from bapipe.planner.options import PlanOptions
from bapipe.planner.searched_space import GIVEN_ORDER, on_first_devices
from bapipe.planner.validation import microbatch_sizes, named_schedules
from bapipe.schedules import SCHEDULES
from bapipe.simulator.interval_costs import IntervalCosts

MAX_PERMUTED_DEVICES = 5
"""Maximum number of devices of a cluster with which the replicas of a stage are tried in every order; with more, the
fastest comes first."""

SYNC_CLASS_DIVISORS = (20, 5)
"""Thresholds between the sync classes: an ideal step time divided by these; see `cost_to_go.py`."""

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


def search_space(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    deadline: Deadline = UNLIMITED,
) -> SearchSpace:
    """Returns the search space of some options.

    Raises:
        BapipeError: constraints that cannot be met, or a number of stages that is impossible.
        OutOfTime: the deadline passed before.
    """
    check_constraints(parse_constraints(options.constraints), next(iter(profiles.values())), cluster)
    sizes = microbatch_sizes(profiles, cluster, options)
    space = build_space(profiles, cluster, options, sizes=sizes, deadline=deadline)
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
    options: PlanOptions,
    *,
    sizes: Sequence[int],
    enabled_bounds: frozenset[str] = BOUND_NAMES,
    deadline: Deadline = UNLIMITED,
) -> SearchSpace:
    """Returns every problem of a space. Placements and cost-to-go are computed when a search asks for them.

    Args:
        sizes: micro-batch sizes that divide the mini-batch.
        enabled_bounds: names of the lower bounds to use; all but in experiments.
        deadline: ends the making of the space, and later of its tables, with OutOfTime.
    """
    constraints = parse_constraints(options.constraints)
    classes = device_classes(
        cluster, options.limits(cluster), constraints.allowed_layers(cluster), ns_per_sample(profiles, cluster)
    )
    profiles = {cls.device.kind: profiles[cls.device.kind] for cls in classes}
    links = ClassLinks(cluster, classes)
    symmetry = ClassSymmetry(types=tuple(cls.type_number for cls in classes), hosts=tuple(cls.host for cls in classes))
    intervals: IntervalIndex | None = None
    any_order = _allows_any_order(profiles, cluster, options, classes)
    problems = []
    # Problems of one micro-batch size share chains and costs; the intervals serve all sizes, as legal cuts do not
    # depend on the size.
    for size in reversed(sizes):
        deadline.check()
        chains = _chains(profiles, classes, size)
        intervals = intervals or IntervalIndex(constraints.allowed_cuts(next(iter(profiles.values())), chains[0].legal))
        forbidden = constraints.forbidden_intervals(next(iter(profiles.values())), intervals, classes)
        costs = _stage_costs(profiles, classes, links, intervals, size, chains, options.recompute, forbidden, deadline)
        work_ns, num_microbatches = _min_work_ns(profiles, size), options.minibatch_size // size
        # All work spread evenly over all devices: the scale for the thresholds between sync classes.
        ideal_step_ns = int(num_microbatches * work_ns / total_rate([len(cls.ranks) for cls in classes], classes))
        for schedule in named_schedules(options):
            placements = PlacementGraph(
                schedule,
                num_microbatches,
                symmetry,
                replicas=options.replicas,
                permute_replicas=len(cluster.devices) <= MAX_PERMUTED_DEVICES,
                deadline=deadline,
            )
            lower_bound = LowerBound(
                costs,
                num_microbatches,
                forwards_first=_runs_forwards_first(schedule),
                sync_limits_ns=[ideal_step_ns // divisor for divisor in SYNC_CLASS_DIVISORS],
                enabled=enabled_bounds,
                deadline=deadline,
            )
            roots = make_roots(
                placements,
                classes,
                work_ns,
                num_stages=options.num_stages,
                max_stages=intervals.num_boundaries - 1,
                any_order=any_order,
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
                    roots=roots,
                    deadline=deadline,
                )
            )
    max_stages = 0 if intervals is None else intervals.num_boundaries - 1
    return SearchSpace(
        problems=tuple(problems),
        order=device_order_text(any_order, cluster, classes),
        stage_counts=_stage_counts(problems, len(cluster.devices), max_stages),
        device_counts=tuple(sorted({root.num_devices for problem in problems for root in problem.roots})),
    )


def tries_any_order(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> bool:
    """Returns whether the space has any order of the devices, which are few or alike, or only the cluster's."""
    allowed = parse_constraints(options.constraints).allowed_layers(cluster)
    classes = device_classes(cluster, options.limits(cluster), allowed, ns_per_sample(profiles, cluster))
    return _allows_any_order(profiles, cluster, options, classes)


def _allows_any_order(
    profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions, classes: Sequence[DeviceClass]
) -> bool:
    # A stage has at most one replica per micro-batch, and there are at most as many stages as layers.
    return allow_any_order(classes, min(len(cluster.devices), options.minibatch_size * _num_layers(profiles)))


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
                count
                for count in (len(positions_of_stages(placements.schedule, n)) for n in device_counts)
                if count <= max_stages
            }
    return tuple(sorted(stage_counts))


def device_order_text(any_order: bool, cluster: Cluster, classes: Sequence[DeviceClass]) -> str:
    """Returns how devices are given to stages, in the words of the certificate; they are part of plan files."""
    if len(cluster.devices) == 1:
        return ""
    if not any_order:
        return on_first_devices([GIVEN_ORDER])
    if len(classes) == 1 or len(cluster.devices) <= MAX_PERMUTED_DEVICES:
        return ", in any order"
    return ", in any order, those of one stage the fastest first"


def _num_layers(profiles: Mapping[str, ModelProfile]) -> int:
    return len(next(iter(profiles.values())).layers)


def ns_per_sample(profiles: Mapping[str, ModelProfile], cluster: Cluster) -> list[float]:
    """Returns F and B of all layers per sample, at the largest measured micro-batch size. [ranks]"""
    at_speed_1 = {
        kind: sum(m.forward_ns + m.whole_backward_ns for m in profile.at(profile.microbatch_sizes[-1]))
        / profile.microbatch_sizes[-1]
        for kind, profile in profiles.items()
    }
    return [at_speed_1[device.kind] / device.speed for device in cluster.devices]


def _min_work_ns(profiles: Mapping[str, ModelProfile], size: int) -> int:
    """F and B, or I and W, of all layers, each on the kind of device that is fastest for it at speed 1."""
    rows = [
        [m.forward_ns + min(m.whole_backward_ns, m.input_grad_ns + m.weight_grad_ns) for m in profile.at(size)]
        for profile in profiles.values()
    ]
    return sum(min(times) for times in zip(*rows, strict=True))


def _chains(profiles: Mapping[str, ModelProfile], classes: Sequence[DeviceClass], size: int) -> list[Chain]:
    """The chain as each class runs it; classes of one kind and speed share it. [classes]"""
    at_speed_1 = {kind: Chain(profiles[kind], size, 1.0) for kind in {cls.device.kind for cls in classes}}
    keys = dict.fromkeys((cls.device.kind, cls.device.speed) for cls in classes)
    chains = {(kind, speed): at_speed_1[kind].at_speed(speed) for kind, speed in keys}
    return [chains[cls.device.kind, cls.device.speed] for cls in classes]


def _stage_costs(
    profiles: Mapping[str, ModelProfile],
    classes: Sequence[DeviceClass],
    links: ClassLinks,
    intervals: IntervalIndex,
    size: int,
    chains: Sequence[Chain],
    recompute: bool,
    forbidden: ForbiddenIntervals,
    deadline: Deadline,
) -> StageCostTable:
    # Kinds of devices may disagree about the bytes at a cut: memory takes the maximum, transfers the minimum. Groups of
    # another size hold other bytes, so only those of one size are compared for memory.
    max_bytes = {
        num_members: _max_at_cuts([chain for chain in chains if chain.num_members == num_members])
        for num_members in {chain.num_members for chain in chains}
    }
    times: dict[Hashable, IntervalTimes] = {}
    costs: dict[str, IntervalCosts] = {}
    memory: dict[str, IntervalMemory] = {}
    for cls in classes:
        kind, speed = cls.device.kind, cls.device.speed
        # Bytes depend on the kind of device, times also on its speed.
        if kind not in memory:
            deadline.check()
            memory[kind] = IntervalMemory(intervals, profiles[kind], size, max_bytes[cls.device.num_members])
            costs[kind] = IntervalCosts(profiles[kind], size, 1.0, max_ns=MAX_TIME)
        if (kind, speed) not in times:
            times[kind, speed] = IntervalTimes(intervals, profiles[kind], size, speed, costs[kind])
    recomputation_bounds: dict[str, RecomputationBound] = {}
    for kind, profile in profiles.items() if recompute else ():
        recomputation_bounds[kind] = RecomputationBound(intervals, profile, size, deadline)
    return StageCostTable(
        intervals,
        classes,
        links,
        [times[cls.device.kind, cls.device.speed] for cls in classes],
        memory=StageMemory(
            intervals,
            classes,
            [memory[cls.device.kind] for cls in classes],
            Recomputation(bounds=recomputation_bounds, choice=LayerChoice(profiles, size, deadline))
            if recompute
            else None,
            forbidden,
        ),
        transfers=CutTransfers(
            classes,
            links,
            _min_at_boundaries([chain.send_bytes for chain in chains], intervals),
            _min_at_boundaries([chain.grad_bytes for chain in chains], intervals),
        ),
        deadline=deadline,
    )


def _max_at_cuts(chains: Sequence[Chain]) -> tuple[list[int], list[int]]:
    """The maximum over the chains of the activations and of the gradients before every layer. [layers + 1]"""
    return (
        [max(values) for values in zip(*(chain.send_bytes for chain in chains), strict=True)],
        [max(values) for values in zip(*(chain.grad_bytes for chain in chains), strict=True)],
    )


def _min_at_boundaries(cut_bytes: Sequence[Sequence[int]], intervals: IntervalIndex) -> IntArray:
    """The minimum over the chains of the bytes at every boundary. [chains, layers + 1] -> [boundaries]"""
    return np.array([min(values[cut] for values in cut_bytes) for cut in intervals.cuts], dtype=np.int64)
