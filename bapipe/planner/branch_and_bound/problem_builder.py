"""Builds the problems of a search space: one per schedule and micro-batch size."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.branch_and_bound.lower_bound import LowerBound
from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.branch_and_bound.roots import make_roots, total_rate
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.scalable_times import scalable_times
from bapipe.planner.inputs.validation import named_schedules
from bapipe.planner.stages.chain import Chain
from bapipe.planner.stages.constraints import Constraints
from bapipe.planner.stages.cut_transfers import CutTransfers
from bapipe.planner.stages.devices import ClassLinks, ClassSymmetry, DeviceClass
from bapipe.planner.stages.interval_memory import IntervalMemory
from bapipe.planner.stages.interval_times import IntervalTimes
from bapipe.planner.stages.intervals import MAX_TIME, IntArray, IntervalIndex
from bapipe.planner.stages.placements import ClassSequence, PlacementGraph
from bapipe.planner.stages.recomputation import LayerChoice, Recomputation, RecomputationBound
from bapipe.planner.stages.stage_candidates import StageCostTable
from bapipe.planner.stages.stage_memory import StageMemory
from bapipe.planner.stages.stage_schedule import runs_forwards_first
from bapipe.schedules import SCHEDULES
from bapipe.simulator.interval_costs import IntervalCosts
from bapipe.simulator.tied_weights import legal_cuts

MAX_PERMUTED_DEVICES = 5
"""In clusters of at most this many devices, replicas of a stage are tried in every order; else the fastest is first."""

FINISH_CLASS_DIVISORS = (20, 5)
"""The thresholds between the finish classes are an ideal step time divided by these; see `cost_to_go.py`."""

PROBE_STAGES, PROBE_MICROBATCHES = 2, 16
"""Size of the table from which is seen whether a schedule runs all forwards first: other schedules have fewer than
these micro-batches in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemBuilder:
    """Builds the problems of a space from what they have in common.

    Attributes:
        profiles: the profiles of the kinds of devices in use.
        classes: the classes of the cluster's devices.
        links: the links between these classes.
        lines: orders of all devices, by class, of which pipelines take the first ones; () to take them in any order.
        deadline: after it, building, and later making tables, raises OutOfTime.
    """

    profiles: ProfilesByKind
    cluster: Cluster
    options: PlanOptions
    constraints: Constraints
    classes: Sequence[DeviceClass]
    links: ClassLinks
    lines: Sequence[ClassSequence]
    deadline: Deadline

    def problems(self, sizes: Sequence[int]) -> tuple[list[Problem], IntervalIndex | None]:
        """Returns the problems at some micro-batch sizes, and the intervals of layers; None if there are no sizes."""
        first = next(iter(self.profiles.values()))
        intervals: IntervalIndex | None = None
        problems = []
        # Problems of one micro-batch size share chains and costs; all share the intervals, because legal cuts do not
        # depend on the size.
        for size in reversed(sizes):
            self.deadline.check()
            chains = _chains(self.profiles, self.classes, size)
            intervals = intervals or IntervalIndex(self.constraints.allowed_cuts(first, legal_cuts(first.layers)))
            costs = self._stage_costs(intervals, size, chains)
            problems += [self._problem(schedule, size, chains, costs) for schedule in named_schedules(self.options)]
        return problems, intervals

    def _problem(self, schedule: str, size: int, chains: Sequence[Chain], costs: StageCostTable) -> Problem:
        """Returns the problem of a schedule; `chains` are the layers on each class. [classes]"""
        classes, options = self.classes, self.options
        work_ns, num_microbatches = _min_work_ns(self.profiles, self.cluster, size), options.minibatch_size // size
        placements = PlacementGraph(
            schedule,
            num_microbatches,
            ClassSymmetry(types=tuple(cls.type_number for cls in classes), hosts=tuple(cls.host for cls in classes)),
            replicas=options.replicas,
            permute_replicas=len(self.cluster.devices) <= MAX_PERMUTED_DEVICES,
            deadline=self.deadline,
        )
        # An ideal step has all work spread evenly over all devices: the scale of the thresholds between finish classes.
        ideal_step_ns = int(num_microbatches * work_ns / total_rate([len(cls.ranks) for cls in classes], classes))
        lower_bound = LowerBound(
            costs,
            num_microbatches,
            forwards_first=_runs_forwards_first(schedule),
            finish_limits_ns=[ideal_step_ns // divisor for divisor in FINISH_CLASS_DIVISORS],
            deadline=self.deadline,
        )
        roots = make_roots(
            placements,
            classes,
            work_ns,
            num_stages=options.num_stages,
            max_stages=costs.intervals.num_boundaries - 1,
            lines=self.lines,
        )
        return Problem(
            cluster=self.cluster,
            classes=classes,
            chains=chains,
            schedule=schedule,
            microbatch_size=size,
            num_microbatches=num_microbatches,
            placements=placements,
            lower_bound=lower_bound,
            roots=roots,
            deadline=self.deadline,
        )

    def _stage_costs(self, intervals: IntervalIndex, size: int, chains: Sequence[Chain]) -> StageCostTable:
        """Returns the costs of all stages at a micro-batch size; `chains` are the layers on each class. [classes]"""
        profiles, classes = self.profiles, self.classes
        # If kinds of devices disagree about the bytes at a cut, memory takes the maximum and transfers the minimum. In
        # groups of different sizes a member holds different bytes, so the maximum is over groups of one size.
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
                self.deadline.check()
                memory[kind] = IntervalMemory(intervals, profiles[kind], size, max_bytes[cls.device.num_members])
                costs[kind] = IntervalCosts(profiles[kind], size, 1.0, max_ns=MAX_TIME)
            if (kind, speed) not in times:
                times[kind, speed] = IntervalTimes(intervals, profiles[kind], size, speed, costs[kind])
        return StageCostTable(
            intervals,
            classes,
            self.links,
            [times[cls.device.kind, cls.device.speed] for cls in classes],
            memory=StageMemory(
                intervals,
                classes,
                [memory[cls.device.kind] for cls in classes],
                self._recomputation(intervals, size) if self.options.recompute else None,
                self.constraints.forbidden_intervals(next(iter(profiles.values())), intervals, classes),
            ),
            transfers=CutTransfers(
                classes,
                self.links,
                _min_at_boundaries([chain.send_bytes for chain in chains], intervals),
                _min_at_boundaries([chain.grad_bytes for chain in chains], intervals),
            ),
            deadline=self.deadline,
        )

    def _recomputation(self, intervals: IntervalIndex, size: int) -> Recomputation:
        """Returns the bounds and the choice of recomputed layers at a micro-batch size."""
        bounds = {
            kind: RecomputationBound(intervals, scalable_times(profile, size, self.cluster), self.deadline)
            for kind, profile in self.profiles.items()
        }
        return Recomputation(bounds=bounds, choice=LayerChoice(self.profiles, self.cluster, size, self.deadline))


def _runs_forwards_first(schedule: str) -> bool:
    """Returns whether a schedule has one stage per device and all F of a device before its first backward (GPipe)."""
    if schedule not in SCHEDULES:
        return False
    return all(map(runs_forwards_first, SCHEDULES[schedule](PROBE_STAGES, PROBE_MICROBATCHES).order))


def _min_work_ns(profiles: ProfilesByKind, cluster: Cluster, size: int) -> int:
    """Returns a lower bound on F and the backward of a micro-batch in all layers, at speed 1.

    Each layer counts on the kind of device that is fastest for it, with B or I + W.
    """
    rows = [
        [m.forward_ns + m.min_backward_ns for m in scalable_times(profile, size, cluster)]
        for profile in profiles.values()
    ]
    return sum(min(times) for times in zip(*rows, strict=True))


def _chains(profiles: ProfilesByKind, classes: Sequence[DeviceClass], size: int) -> list[Chain]:
    """Returns the layers on each class of devices; classes of one kind and speed share a chain. [classes]"""
    at_speed_1 = {kind: Chain(profiles[kind], size, 1.0) for kind in {cls.device.kind for cls in classes}}
    keys = dict.fromkeys((cls.device.kind, cls.device.speed) for cls in classes)
    chains = {(kind, speed): at_speed_1[kind].at_speed(speed) for kind, speed in keys}
    return [chains[cls.device.kind, cls.device.speed] for cls in classes]


def _max_at_cuts(chains: Sequence[Chain]) -> tuple[list[int], list[int]]:
    """Returns the maxima over the chains of the activations and of the gradients at each cut, in bytes. [layers + 1]"""
    return (
        [max(values) for values in zip(*(chain.send_bytes for chain in chains), strict=True)],
        [max(values) for values in zip(*(chain.grad_bytes for chain in chains), strict=True)],
    )


def _min_at_boundaries(cut_bytes: Sequence[Sequence[int]], intervals: IntervalIndex) -> IntArray:
    """Returns the minimum over the chains of the bytes at each boundary. [chains][layers + 1] -> [boundaries]"""
    return np.array([min(values[cut] for values in cut_bytes) for cut in intervals.cuts], dtype=np.int64)
