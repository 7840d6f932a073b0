"""One problem of the search: a schedule at one micro-batch size on a cluster.

A solution is a `Layout`: the cuts of the chain of layers, and for each stage its placement and the layers that it
recomputes. Its step time and memory come from the simulator.
"""

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from bapipe.formats.cluster import Cluster
from bapipe.planner.branch_and_bound.lower_bound import LowerBound
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.results.preference import Preference
from bapipe.planner.stages.chain import Chain, stage_on
from bapipe.planner.stages.devices import DeviceClass
from bapipe.planner.stages.intervals import IntArray
from bapipe.planner.stages.placements import ClassCounts, PlacementGraph, StagePlacement
from bapipe.planner.stages.shared_devices import SharedDevices
from bapipe.schedules.placement import merge_stages, permute_ranks
from bapipe.schedules.table import Schedule
from bapipe.simulator.allreduce import LastBackward, reduce_buckets
from bapipe.simulator.compiled import CompiledSchedule, compile_schedule, permute_compiled
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.simulate import finish_ns, longest_path_is_exact, simulate_columns
from bapipe.simulator.stage import Stage
from bapipe.simulator.timeline import StepColumns

MAX_CACHED_SCHEDULES = 500
"""Maximum number of compiled schedules on ranks of the cluster that a problem caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A root of the search tree: all pipelines on one choice of devices.

    Attributes:
        num_devices: how many devices these are.
        num_of_class: how many of each class. [device classes]
        first_placements: the possible placements of the first stage.
        bound_ns: a lower bound on the step time that needs no tables: all work at the speed of all devices together.
        num_positions: the number of devices if these have several stages, else 0.
    """

    num_devices: int
    num_of_class: ClassCounts
    first_placements: tuple[StagePlacement, ...]
    bound_ns: int
    num_positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A solution of a problem: stage s holds the layers [cuts[s], cuts[s + 1]) on placements[s].

    Attributes:
        cuts: the layers at which stages begin, and the number of layers. [stages + 1]
        placements: the devices of each stage. [stages]
        recompute: the numbers of the layers that each stage recomputes. [stages]
        is_best: whether it is proven that no other choice of recomputed layers is faster.
        fits: whether each stage fits in memory by itself.
        is_checked: whether `fits` is already what the simulator says of whole devices.
        bound_ns: a lower bound on the step with these cuts and placements and any choice of recomputed layers.
    """

    cuts: tuple[int, ...]
    placements: tuple[StagePlacement, ...]
    recompute: tuple[frozenset[int], ...]
    is_best: bool = True
    fits: bool = True
    is_checked: bool = False
    bound_ns: int = 0


class Problem:
    """A schedule at one micro-batch size, on the devices of a cluster.

    Attributes:
        classes: the classes of the cluster's devices.
        chains: the layers on each class of devices. [classes]
        placements: makes the placements of stages.
        lower_bound: computes the bounds for partial plans.
        roots: the choices of devices that are searched.
        deadline: after it, long computations raise OutOfTime.
        must_check_memory: whether the memory check of the search is only approximate, because profiles may disagree
            about the sizes of tensors at cuts.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        classes: Sequence[DeviceClass],
        chains: Sequence[Chain],
        schedule: str,
        microbatch_size: int,
        num_microbatches: int,
        placements: PlacementGraph,
        lower_bound: LowerBound,
        roots: Sequence[Root],
        deadline: Deadline = UNLIMITED,
    ) -> None:
        self.deadline = deadline
        self.cluster, self.classes, self.chains = cluster, tuple(classes), tuple(chains)
        self.schedule, self.microbatch_size, self.num_microbatches = schedule, microbatch_size, num_microbatches
        self.placements, self.lower_bound, self.roots = placements, lower_bound, tuple(roots)
        self.must_check_memory = len({chain.device_kind for chain in chains}) > 1
        # Compiled schedules on ranks of the cluster, by placements; and on ranks 0, 1, ..., by the numbers of replicas
        # and of devices, so that all placements with equal numbers share one.
        self._on_cluster: dict[tuple[StagePlacement, ...], tuple[Schedule, CompiledSchedule]] = {}
        self._on_first_ranks: dict[tuple[tuple[int, ...], int], tuple[Schedule, CompiledSchedule]] = {}
        self._shared_devices: dict[tuple[StagePlacement, ...], SharedDevices] = {}

    @property
    def cuts(self) -> tuple[int, ...]:
        """The layers at which stages may begin, and the number of layers. [boundaries]"""
        return self.lower_bound.costs.intervals.cuts

    def with_num_devices(self, num_devices: int) -> "Problem":
        """Returns the problem on exactly this number of devices; it shares its caches with this one."""
        return self.with_roots([root for root in self.roots if root.num_devices == num_devices])

    def with_roots(self, roots: Sequence[Root]) -> "Problem":
        """Returns the problem with other roots; it shares its caches with this one."""
        other = copy(self)
        other.roots = tuple(roots)
        return other

    def narrowed(self, rows: Mapping[Hashable, IntArray]) -> "Problem":
        """Returns the problem in which stages may only have some intervals; see `LowerBound.narrowed`."""
        other = copy(self)
        other.lower_bound = self.lower_bound.narrowed(rows)
        return other

    def layout(self, boundaries: Sequence[int], placements: tuple[StagePlacement, ...]) -> Layout:
        """Returns the layout of a pipeline cut at boundaries; stages that do not fit recompute layers."""
        if placements[0].position is not None:
            return self._layout_on_shared_devices(boundaries, placements)
        costs = self.lower_bound.costs
        chosen = [
            costs.memory.recomputed_layers(placement, begin, end)
            for placement, (begin, end) in zip(placements, pairwise(boundaries), strict=True)
        ]
        return Layout(
            cuts=tuple(self.cuts[i] for i in boundaries),
            placements=placements,
            recompute=tuple(of.layers for of in chosen),
            is_best=all(of.is_best for of in chosen),
            fits=all(of.fits for of in chosen),
        )

    def _layout_on_shared_devices(self, boundaries: Sequence[int], placements: tuple[StagePlacement, ...]) -> Layout:
        """Returns the layout on devices with several stages; stages of devices on which they do not fit recompute."""
        layout = Layout(
            cuts=tuple(self.cuts[i] for i in boundaries),
            placements=placements,
            recompute=(frozenset[int](),) * len(placements),
        )
        recomputation = self.lower_bound.costs.memory.recomputation
        if recomputation is None:
            return layout
        schedule, compiled = self.compiled(placements)
        if placements not in self._shared_devices:
            self._shared_devices[placements] = SharedDevices(
                schedule, compiled, self.cluster, self._limits(schedule), recomputation.choice
            )
        chosen = self._shared_devices[placements].choose(
            list(pairwise(layout.cuts)),
            lambda recompute: self.stages(replace(layout, recompute=recompute)),
            lambda stages: step_ns_of(schedule, compiled, stages, self.cluster),
        )
        return replace(
            layout,
            recompute=chosen.recompute,
            is_best=chosen.is_best,
            fits=chosen.fits,
            bound_ns=chosen.bound_ns,
            is_checked=not any(chosen.recompute),
        )

    def ranks(self, placements: Sequence[StagePlacement]) -> tuple[tuple[int, ...], ...]:
        """Returns the ranks of each stage: of each class, the unused ones in ascending order. [stages][replicas]"""
        unused = [iter(cls.ranks) for cls in self.classes]
        rank_at: dict[int, int] = {}
        ranks = []
        for placement in placements:
            if placement.position is None:
                ranks.append(tuple(next(unused[c]) for c in placement.device_classes))
                continue
            # With several stages per device, the first stage at a position takes a rank, and the others share it.
            if placement.position not in rank_at:
                rank_at[placement.position] = next(unused[placement.device_classes[0]])
            ranks.append((rank_at[placement.position],))
        return tuple(ranks)

    def compiled(self, placements: tuple[StagePlacement, ...]) -> tuple[Schedule, CompiledSchedule]:
        """Returns the schedule of a pipeline on ranks of the cluster, and its compiled form."""
        if placements not in self._on_cluster:
            if len(self._on_cluster) >= MAX_CACHED_SCHEDULES:
                self._on_cluster.clear()
                self._shared_devices.clear()
            ranks = self.ranks(placements)
            # The rank in the cluster of each rank in the schedule's own table.
            if placements[0].position is None:
                permutation = [rank for replicas in ranks for rank in replicas]
            else:
                at_position = {(p.position, replicas[0]) for p, replicas in zip(placements, ranks, strict=True)}
                permutation = [rank for _, rank in sorted(at_position)]
            schedule, compiled = self._compile(placements, len(permutation))
            num_ranks = len(self.cluster.devices)
            self._on_cluster[placements] = (
                permute_ranks(schedule, permutation, num_ranks),
                permute_compiled(compiled, permutation, num_ranks),
            )
        return self._on_cluster[placements]

    def _compile(self, placements: Sequence[StagePlacement], num_devices: int) -> tuple[Schedule, CompiledSchedule]:
        """Returns the same on ranks 0, 1, ..., compiled once for all placements with equal numbers of replicas."""
        num_replicas = tuple(placement.num_replicas for placement in placements)
        if (num_replicas, num_devices) not in self._on_first_ranks:
            schedule = self.placements.table(num_devices)
            if placements[0].position is None:
                # The replicas of stage s are ranks [firsts[s], firsts[s + 1]) of the table with one stage per device.
                firsts = accumulate(num_replicas, initial=0)
                schedule = merge_stages(schedule, [tuple(range(a, b)) for a, b in pairwise(firsts)], num_devices)
            self._on_first_ranks[num_replicas, num_devices] = schedule, compile_schedule(schedule)
        return self._on_first_ranks[num_replicas, num_devices]

    def stages(self, layout: Layout) -> tuple[Stage, ...]:
        """Returns the costs of the layout's stages. [stages]"""
        return tuple(
            stage_on([self.chains[c] for c in placement.device_classes], begin, end, recompute=recompute)
            for placement, (begin, end), recompute in zip(
                layout.placements, pairwise(layout.cuts), layout.recompute, strict=True
            )
        )

    def shortfall_bytes(self, layout: Layout) -> dict[int, int]:
        """Returns by how many bytes each rank in use exceeds its limit in the simulator; negative if it has room."""
        schedule, compiled = self.compiled(layout.placements)
        peaks = peak_memory(schedule, self.stages(layout), compiled)
        return {rank: peaks[rank].total - limit for rank, limit in self._limits(schedule).items()}

    def peak_bytes(self, layout: Layout) -> int:
        """Returns the largest peak memory of a device, by the simulator."""
        schedule, compiled = self.compiled(layout.placements)
        return max(memory.total for memory in peak_memory(schedule, self.stages(layout), compiled))

    def _limits(self, schedule: Schedule) -> dict[int, int]:
        """Returns the bytes that each rank in use may hold."""
        limits = {rank: cls.limit_bytes for cls in self.classes for rank in cls.ranks}
        return {rank: limits[rank] for rank in sorted({rank for ranks in schedule.devices for rank in ranks})}

    def fits(self, layout: Layout) -> bool:
        """Returns whether a layout fits in memory.

        It must fit by the check of the search and in the simulator. These differ only with profiles of several kinds,
        with several stages on a device, and with recomputed layers, so only then the simulator is asked.
        """
        if not layout.fits or layout.is_checked:
            return layout.fits
        if layout.placements[0].position is None and not self.must_check_memory and not any(layout.recompute):
            return True
        return all(shortfall <= 0 for shortfall in self.shortfall_bytes(layout).values())

    def is_cheap_to_simulate(self, layout: Layout) -> bool:
        """Returns whether the longest path gives the step time, so that the event-driven engine is not needed."""
        return longest_path_is_exact(self.compiled(layout.placements)[1], self.cluster)

    def step_ns(self, layout: Layout) -> int:
        """Returns the simulated step time, without computing the whole timeline if possible."""
        return step_ns_of(*self.compiled(layout.placements), self.stages(layout), self.cluster)

    def simulate(self, layout: Layout) -> StepColumns:
        """Returns the timeline of a simulated step."""
        schedule, compiled = self.compiled(layout.placements)
        return simulate_columns(schedule, self.stages(layout), self.cluster, compiled)


def step_ns_of(schedule: Schedule, compiled: CompiledSchedule, stages: Sequence[Stage], cluster: Cluster) -> int:
    """Returns the simulated step time of a compiled schedule, without computing the whole timeline if possible."""
    # Only the whole timeline has sums of tied weights, and all-reduces between the actions of a device's stages.
    if any(stage.tied_gradients for stage in stages) or _sums_between_stages(schedule, stages):
        return simulate_columns(schedule, stages, cluster, compiled).step_ns
    done_ns = finish_ns(compiled, stages, cluster)
    for stage, ranks in zip(stages, schedule.devices, strict=True):
        # A step ends with all-reduces and updates, which are not among the actions of the schedule.
        synced_ns = _synced_ns(stage, ranks, schedule, done_ns, cluster)
        for cost, rank in zip(stage.costs, ranks, strict=True):
            done_ns[rank] = max(done_ns[rank], synced_ns) + cost.update_ns
    return max(done_ns)


def _sums_between_stages(schedule: Schedule, stages: Sequence[Stage]) -> bool:
    """Returns whether devices with several stages have all-reduces: those of the members of a group."""
    if not any(stage.bucket_bytes for stage in stages):
        return False
    ranks = [rank for of_stage in schedule.devices for rank in of_stage]
    return len(set(ranks)) < len(ranks)


def _synced_ns(stage: Stage, ranks: Sequence[int], schedule: Schedule, done_ns: Sequence[int], cluster: Cluster) -> int:
    """Returns when the all-reduces of a stage are done, 0 without any; its devices must have no other stage.

    Args:
        done_ns: when the last action of each rank ends. [ranks]
    """
    if not stage.bucket_bytes:
        return 0
    last: list[LastBackward | None] = []
    for cost, rank in zip(stage.costs, ranks, strict=True):
        phase = schedule.order[rank][-1].phase if schedule.order[rank] else None
        # A replica ends with its last B or W, during which its buckets become ready.
        last.append(None if phase is None else (done_ns[rank] - cost.ns(phase), phase))
    return reduce_buckets(stage, ranks, last, cluster)[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best layout found over all problems, and a lower bound on the step of every layout of them.

    `lower_bound_ns == step_ns` proves the layout optimal.

    Attributes:
        problem: the problem of the layout.
        is_exhausted: whether all layouts were searched. If a gap remains, only another choice of recomputed layers can
            be faster.
    """

    problem: Problem
    layout: Layout
    step_ns: int
    lower_bound_ns: int
    is_exhausted: bool = False

    @property
    def preference(self) -> Preference:
        """Which of several results is preferred."""
        placements = self.layout.placements
        num_devices = len({rank for ranks in self.problem.ranks(placements) for rank in ranks})
        return Preference(self.step_ns, self.problem.peak_bytes(self.layout), num_devices, len(placements))
