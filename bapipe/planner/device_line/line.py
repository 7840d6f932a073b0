"""The devices of a cluster in one order, and the step time and memory of plans whose stages take consecutive ones."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from msgspec import structs

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.formats.stage_plan import has_idle_replicas
from bapipe.planner.branch_and_bound.problem import step_ns_of
from bapipe.planner.device_line.in_flight import check_is_described, most_held
from bapipe.planner.device_line.recomputed_layers import layer_items, recomputed_layers
from bapipe.planner.device_line.search_arrays import LayerItems
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.sub_clusters import links_among
from bapipe.planner.inputs.validation import named_schedules
from bapipe.planner.results.decision import stage_plans
from bapipe.planner.results.searched_space import SearchedSpace
from bapipe.planner.results.solution import Solution
from bapipe.planner.stages.chain import Chain, stage_on
from bapipe.planner.stages.constraints import is_among, parse_constraints
from bapipe.planner.stages.devices import device_classes, ns_per_sample
from bapipe.planner.stages.recomputation import StashLimit
from bapipe.planner.stages.stage_schedule import memory_peaks
from bapipe.schedules import ALL, SCHEDULES
from bapipe.schedules.placement import merged_named, permute_ranks
from bapipe.schedules.table import Schedule
from bapipe.simulator.compiled import CompiledSchedule, compile_schedule, permute_compiled
from bapipe.simulator.memory import RankMemory, rank_memory
from bapipe.simulator.simulate import simulate_columns
from bapipe.simulator.stage import Stage
from bapipe.simulator.tied_weights import legal_cuts

MAX_CACHED_TABLES = 4
"""How many compiled schedules are kept: plans that differ only in their cuts share one."""

MAX_KEPT_ACTIONS = 2**21
"""How many actions of schedule tables with one device per stage are kept: 200 MB. Plans with equally many devices share
a table, whatever their stages."""

_NONE: tuple[frozenset[int], ...] = (frozenset(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlan:
    """Stages on the first devices of a cluster.

    Attributes:
        cuts: stage s holds the layers [cuts[s], cuts[s + 1]).
        counts: the number of devices of each stage; for a schedule with several stages per device, 1 for each device.
    """

    cuts: tuple[int, ...]
    counts: tuple[int, ...]
    schedule: str
    microbatch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """A plan that fits: the layers that each of its stages recomputes, and its step time on the devices of a line."""

    line: "DeviceLine"
    plan: LinePlan
    recompute: tuple[frozenset[int], ...]
    step_ns: int


class DeviceLine:
    """Times plans for given profiles, cluster and options.

    Attributes:
        cluster: its devices in the order in which plans take them.
        ranks: the ranks of these devices in the cluster as it was given.
        cuts: where the layers may be cut, including the start and the end.
        kinds: the kinds of its devices, in alphabetical order.
    """

    def __init__(self, profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> None:
        for schedule in named_schedules(options):
            check_is_described(schedule)
        self.profiles, self.cluster, self.options = profiles, cluster, options
        self._given, self.ranks = cluster, tuple(range(len(cluster.devices)))
        self.constraints = parse_constraints(options.constraints)
        self._tell_devices_apart()
        layers = next(iter(profiles.values())).layers
        self.names = [layer.name for layer in layers]
        self._without_replicas = {i for i, layer in enumerate(layers) if not layer.allows_replicas}
        self._chains: dict[tuple[str, float, int], Chain] = {}
        self._orders: dict[tuple[str, tuple[int, ...], int], tuple[Schedule, CompiledSchedule]] = {}
        self._tables: dict[tuple[str, int, int], Schedule] = {}
        self._items: dict[int, LayerItems] = {}
        first = profiles[cluster.devices[0].kind]
        self.cuts = self.constraints.allowed_cuts(first, legal_cuts(first.layers))

    def in_order(self, ranks: tuple[int, ...]) -> "DeviceLine":
        """Returns the line with some of the cluster's devices, in an order; both share what does not depend on it."""
        other = copy(self)
        given = self._given
        other.ranks = ranks
        devices = tuple(given.devices[rank] for rank in ranks)
        other.cluster = structs.replace(given, devices=devices, links=links_among(given, devices))
        other._orders = {}
        other._tell_devices_apart()
        return other

    def _tell_devices_apart(self) -> None:
        """Stores the memory limit and the class of each device, and the kinds.

        Classes are numbered as in the cluster as it was given: so of equally fast devices the same ones come first in
        a stage, whatever the order of the line.
        """
        given = self._given
        self.kinds = sorted({device.kind for device in given.devices})
        limits = self.options.limits(given)
        allowed = self.constraints.allowed_layers(given)
        classes = device_classes(given, limits, allowed, ns_per_sample(self.profiles, given))
        class_of = {rank: c for c, cls in enumerate(classes) for rank in cls.ranks}
        self.limits = [limits[rank] for rank in self.ranks]
        self.class_of = {place: class_of[rank] for place, rank in enumerate(self.ranks)}

    def chain(self, rank: int, microbatch_size: int) -> Chain:
        """Returns the layers as a device runs them."""
        device = self.cluster.devices[rank]
        key = device.kind, device.speed, microbatch_size
        if key not in self._chains:
            alike = next((one for (kind, _, size), one in self._chains.items() if (kind, size) == key[::2]), None)
            self._chains[key] = (
                Chain(self.profiles[device.kind], microbatch_size, device.speed)
                if alike is None
                else alike.at_speed(device.speed)
            )
        return self._chains[key]

    def time(self, plan: LinePlan) -> TimedPlan | None:
        """Returns the step time of a plan, None if it does not fit or breaks a constraint.

        Stages that do not fit otherwise recompute layers, if the options allow it and each device has one stage: nearly
        those of the minimum forward time, or all if the stage does not fit with these in the simulator.
        """
        order, compiled = self._order(plan)
        if not self._is_allowed(plan, order.devices):
            return None
        stages = self._stages(plan, order.devices, _NONE * len(order.devices))
        memory = rank_memory(order, stages, compiled)
        short = self._short_ranks(memory)
        if not short:
            step_ns = step_ns_of(order, compiled, stages, self.cluster)
            return TimedPlan(line=self, plan=plan, recompute=_NONE * len(order.devices), step_ns=step_ns)
        if not self.options.recompute or plan.schedule not in SCHEDULES:
            return None
        short_stages = [s for s, ranks in enumerate(order.devices) if short & set(ranks)]
        rooms = [limit - held.peak.total + held.peak.stash for limit, held in zip(self.limits, memory, strict=True)]
        some, every = [[frozenset[int]() for _ in stages] for _ in range(2)]
        for s in short_stages:
            left = max(cost.gradient_stash_bytes for cost in stages[s].costs)
            some[s] = self._recomputed(plan, s, min(rooms[rank] for rank in order.devices[s]), left)
            every[s] = frozenset(range(plan.cuts[s], plan.cuts[s + 1]))
        return self.time_with(plan, some) or (self.time_with(plan, every) if some != every else None)

    def _recomputed(self, plan: LinePlan, s: int, room_bytes: int, left_bytes: int) -> frozenset[int]:
        """Returns the layers that a stage recomputes so that it fits.

        Args:
            room_bytes: the memory for the stashes of a replica and for what I leaves for W.
            left_bytes: what I leaves for W, of one micro-batch.
        """
        first, size = sum(plan.counts[:s]), plan.microbatch_size
        num_behind, num_microbatches = sum(plan.counts[s:]), self.options.minibatch_size // size
        held = most_held(plan.schedule, first, num_behind, num_microbatches, plan.counts[s])
        if size not in self._items:
            self._items[size] = layer_items([self.profiles[kind] for kind in self.kinds], size)
        return recomputed_layers(
            self._items[size],
            plan.cuts[s],
            plan.cuts[s + 1],
            self.kinds.index(self.cluster.devices[first].kind),
            held,
            room_bytes - held.before_weight_grad * left_bytes,
        )

    def time_with(self, plan: LinePlan, recompute: Sequence[frozenset[int]]) -> TimedPlan | None:
        """Returns the step time of a plan whose stages recompute some layers, None if it does not fit."""
        order, compiled = self._order(plan)
        stages = self._stages(plan, order.devices, recompute)
        if self._short_ranks(rank_memory(order, stages, compiled)):
            return None
        step_ns = step_ns_of(order, compiled, stages, self.cluster)
        return TimedPlan(line=self, plan=plan, recompute=tuple(recompute), step_ns=step_ns)

    def stash_limits(self, timed: TimedPlan) -> list[list[StashLimit]]:
        """Returns the memory limits that each stage's stashes must keep, whichever of its layers are recomputed.

        Empty for stages that do not recompute. [stages][limits]
        """
        order, compiled = self._order(timed.plan)
        stages = self._stages(timed.plan, order.devices, timed.recompute)
        memory = rank_memory(order, stages, compiled)
        limits: list[list[StashLimit]] = [[] for _ in stages]
        for of_stage, stage, ranks in zip(limits, stages, order.devices, strict=True):
            for rank, cost in zip(ranks, stage.costs, strict=True) if stage.recompute else ():
                peak = memory[rank].peak
                room = self.limits[rank] - (peak.total - peak.stash)
                of_stage += [
                    StashLimit(
                        kind=self.cluster.devices[rank].kind,
                        kept=state.kept,
                        in_backward=state.in_backward,
                        room_bytes=room - state.before_weight_grad * cost.gradient_stash_bytes,
                    )
                    for state in memory_peaks(order.order[rank])
                ]
        return limits

    def num_actions(self, plan: LinePlan) -> int:
        """Returns the number of forwards and backwards of a plan."""
        return 2 * (len(plan.cuts) - 1) * (self.options.minibatch_size // plan.microbatch_size)

    def solution(self, timed: TimedPlan, lower_bound_ns: int, space: SearchedSpace) -> Solution:
        """Returns a plan as a solution, without alternatives."""
        plan = timed.plan
        assert timed.line is self
        order, compiled = self._order(plan)
        stages = self._stages(plan, order.devices, timed.recompute)
        num_ranks = len(self._given.devices)
        table = permute_ranks(order, self.ranks, num_ranks)
        compiled = permute_compiled(compiled, self.ranks, num_ranks)
        prediction = simulate_columns(table, stages, self._given, compiled).prediction(self.options.minibatch_size)
        return Solution(
            profiles=self.profiles,
            cluster=self._given,
            minibatch_size=self.options.minibatch_size,
            microbatch_size=plan.microbatch_size,
            schedule=plan.schedule,
            table=table,
            stages=stage_plans(self.names, plan.cuts, table.devices, timed.recompute, self._given),
            prediction=prediction,
            lower_bound_ns=min(lower_bound_ns, prediction.step_ns),
            space=space,
        )

    def _order(self, plan: LinePlan) -> tuple[Schedule, CompiledSchedule]:
        """Returns the schedule on the cluster's ranks, and its compiled form."""
        num_microbatches = self.options.minibatch_size // plan.microbatch_size
        key = plan.schedule, plan.counts, num_microbatches
        if key not in self._orders:
            while len(self._orders) >= MAX_CACHED_TABLES:
                self._orders.pop(next(iter(self._orders)))
            num_devices, num_ranks = sum(plan.counts), len(self.cluster.devices)
            table = partial(self._table, plan.schedule, num_devices, num_microbatches)
            order = (
                merged_named(plan.schedule, self._groups(plan.counts), num_microbatches, num_ranks, table)
                if plan.schedule in SCHEDULES
                else permute_ranks(table(), range(num_devices), num_ranks)
            )
            self._orders[key] = order, compile_schedule.__wrapped__(order)
        return self._orders[key]

    def _table(self, schedule: str, num_devices: int, num_microbatches: int) -> Schedule:
        """Returns the table of a schedule with one stage on each of `num_devices` devices."""
        key = schedule, num_devices, num_microbatches
        if key not in self._tables:
            table = ALL[schedule](num_devices, num_microbatches)
            num_actions = sum(map(len, table.order))
            while self._tables and num_actions + self._num_kept_actions > MAX_KEPT_ACTIONS:
                self._tables.pop(next(iter(self._tables)))
            if num_actions > MAX_KEPT_ACTIONS:
                return table
            self._tables[key] = table
        return self._tables[key]

    @property
    def _num_kept_actions(self) -> int:
        return sum(len(actions) for table in self._tables.values() for actions in table.order)

    def _groups(self, counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the ranks of each stage, the fastest first."""
        firsts = accumulate(counts, initial=0)
        return [self.replicas(first, count) for first, count in zip(firsts, counts, strict=False)]

    def replicas(self, first: int, count: int) -> tuple[int, ...]:
        """Returns the ranks of a stage on `count` devices, in the order in which they take micro-batches."""
        return tuple(sorted(range(first, first + count), key=lambda rank: (self.class_of[rank], rank)))

    def _stages(
        self, plan: LinePlan, devices: Sequence[tuple[int, ...]], recompute: Sequence[frozenset[int]]
    ) -> tuple[Stage, ...]:
        return tuple(
            stage_on(
                [self.chain(rank, plan.microbatch_size) for rank in ranks],
                begin,
                end,
                recompute=layers,
            )
            for (begin, end), ranks, layers in zip(pairwise(plan.cuts), devices, recompute, strict=True)
        )

    def _short_ranks(self, memory: Sequence[RankMemory]) -> set[int]:
        """Returns the ranks that need more memory than their limit."""
        return {rank for rank, held in enumerate(memory) if held.peak.total > self.limits[rank]}

    @property
    def allows_all(self) -> bool:
        """Whether every plan with one stage per device meets the constraints."""
        has_rules = self.constraints.separate or self.constraints.on or self._without_replicas
        are_alike = len({device.num_members for device in self.cluster.devices}) == 1
        return self.options.num_stages is None and not has_rules and are_alike

    def allows(self, plan: LinePlan) -> bool:
        """Returns whether a plan with one stage per device meets the constraints, memory aside."""
        return self._is_allowed(plan, self._groups(plan.counts))

    def _is_allowed(self, plan: LinePlan, devices: Sequence[tuple[int, ...]]) -> bool:
        """Returns whether the number of stages, their devices and the layers to keep apart meet the constraints.

        Also, each replica must have a micro-batch.
        """
        if self.options.num_stages not in (None, len(plan.cuts) - 1):
            return False
        if has_idle_replicas(plan.counts, self.options.minibatch_size // plan.microbatch_size):
            return False
        if any(
            len(ranks) > 1 and self._without_replicas & {*range(*layers)}
            for layers, ranks in zip(pairwise(plan.cuts), devices, strict=True)
        ):
            return False
        rules = self.constraints
        if any(len({self.cluster.devices[rank].num_members for rank in ranks}) > 1 for ranks in devices):
            return False  # all replicas must have equally many members
        stage_of = (
            {name: s for s, (begin, end) in enumerate(pairwise(plan.cuts)) for name in self.names[begin:end]}
            if rules.separate or rules.on
            else {}
        )
        return all(stage_of[a] != stage_of[b] for a, b in rules.separate) and all(
            is_among(self.cluster.devices[rank], names)
            for layer, names in rules.on
            for rank in devices[stage_of[layer]]
        )
