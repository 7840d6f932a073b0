"""Plans made by hand, timed and weighed by the simulator alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.branch_and_bound.problem import step_ns_of
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.stages.chain import Chain, stage_on
from bapipe.schedules import ALL, SCHEDULES
from bapipe.schedules.placement import merge_stages, permute_ranks
from bapipe.schedules.table import Schedule
from bapipe.simulator.compiled import CompiledSchedule, compile_schedule
from bapipe.simulator.memory import rank_memory
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage import Stage
from bapipe.simulator.stage_cost import build_stages

MAX_TABLES = 64

MAX_CHOSEN_STAGES = 8
"""Stages on devices with several up to which any of them may recompute; of more, all on a device that lacks memory."""


@dataclass(frozen=True, kw_only=True)
class HandPlan:
    """A plan without the search.

    Attributes:
        groups: the ranks of each stage; if the schedule has several stages per device, the rank of each device.
        cuts: (0, ..., number of layers): stage s holds the layers cuts[s] to cuts[s + 1], the last one left out.
    """

    schedule: str
    microbatch_size: int
    groups: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]


class Judge:
    """Says how long a step of a plan takes, if it fits."""

    def __init__(self, profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> None:
        self.profiles, self.cluster, self.options = profiles, cluster, options
        self.limits = options.limits(cluster)
        self.names = [layer.name for layer in next(iter(profiles.values())).layers]
        self._chain = lru_cache(maxsize=None)(self._make_chain)
        self._table = lru_cache(maxsize=MAX_TABLES)(self._make_table)

    def chain(self, rank: int, size: int) -> Chain:
        """Returns the layers as a device runs them."""
        device = self.cluster.devices[rank]
        return self._chain(device.kind, device.speed, size)

    def _make_chain(self, kind: str, speed: float, size: int) -> Chain:
        return Chain(self.profiles[kind], size, speed)

    def num_stages(self, schedule: str, groups: Sequence[tuple[int, ...]]) -> int:
        """Returns how many stages a schedule has on so many groups of devices."""
        return len(groups) if schedule in SCHEDULES else ALL[schedule](len(groups), 1).num_stages

    def table(self, plan: HandPlan) -> tuple[Schedule, CompiledSchedule]:
        """Returns the order of a plan's actions."""
        return self._table(plan.schedule, plan.groups, self.options.minibatch_size // plan.microbatch_size)

    def _make_table(
        self, schedule: str, groups: tuple[tuple[int, ...], ...], num_microbatches: int
    ) -> tuple[Schedule, CompiledSchedule]:
        num_devices, num_ranks = sum(map(len, groups)), len(self.cluster.devices)
        table = ALL[schedule](num_devices, num_microbatches)
        placed = (
            merge_stages(table, groups, num_ranks)
            if schedule in SCHEDULES
            else permute_ranks(table, [rank for (rank,) in groups], num_ranks)
        )
        return placed, compile_schedule.__wrapped__(placed)

    def step_ns(self, plan: HandPlan) -> int | None:
        """Returns the step time, None if the plan does not fit. Stages recompute if they do not fit without."""
        fastest = self._fastest(plan)
        return None if fastest is None else fastest[0]

    def simulated_ns(self, plan: HandPlan) -> int:
        """Returns the step time of the whole timeline: what `step_ns` computes a shorter way."""
        table, _ = self.table(plan)
        fastest = self._fastest(plan)
        assert fastest is not None
        stages = [
            StagePlan(
                layers=tuple(self.names[begin:end]),
                devices=tuple(self.cluster.devices[rank].name for rank in ranks),
                recompute=flag,
            )
            for (begin, end), ranks, flag in zip(pairwise(plan.cuts), table.devices, fastest[1], strict=True)
        ]
        costs = build_stages(stages, self.profiles, self.cluster, plan.microbatch_size)
        return simulate_schedule(table, costs, self.cluster).step_ns

    def _fastest(self, plan: HandPlan) -> tuple[int, tuple[bool, ...]] | None:
        """The shortest step and which stages then recompute; None if the plan does not fit."""
        table, compiled = self.table(plan)
        nothing = (False,) * (len(plan.cuts) - 1)
        short = self._short_ranks(plan, nothing)
        choices = [nothing]
        if short and self.options.recompute:
            may = [bool(short & set(ranks)) for ranks in table.devices]
            several = plan.schedule not in SCHEDULES and sum(may) <= MAX_CHOSEN_STAGES
            choices = list(product(*((False, True)[: each + 1] for each in may))) if several else [tuple(may)]
        steps = (
            (step_ns_of(table, compiled, self._stages(plan, table, recompute), self.cluster), recompute)
            for recompute in choices
            if not self._short_ranks(plan, recompute)
        )
        return min(steps, default=None)

    def _short_ranks(self, plan: HandPlan, recompute: Sequence[bool]) -> set[int]:
        """The ranks on which the plan does not fit."""
        table, compiled = self.table(plan)
        memory = rank_memory(table, self._stages(plan, table, recompute), compiled)
        return {rank for rank, held in enumerate(memory) if held.peak.total > self.limits[rank]}

    def _stages(self, plan: HandPlan, table: Schedule, recompute: Sequence[bool]) -> tuple[Stage, ...]:
        return tuple(
            stage_on(
                [self.chain(rank, plan.microbatch_size) for rank in ranks],
                begin,
                end,
                recompute=frozenset(range(begin, end)) if flag else frozenset(),
            )
            for (begin, end), ranks, flag in zip(pairwise(plan.cuts), table.devices, recompute, strict=True)
        )
