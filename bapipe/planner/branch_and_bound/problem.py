"""One question to a search: which layers run together, and where, for a schedule and a micro-batch size."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bapipe.formats.cluster import Cluster
from bapipe.planner.branch_and_bound.chain import Chain, stage_on
from bapipe.planner.branch_and_bound.devices import DeviceClass
from bapipe.planner.branch_and_bound.lower_bound import LowerBound
from bapipe.planner.branch_and_bound.placements import PlacementGraph, StagePlacement
from bapipe.planner.schedule_placement import merge_stages, permute_compiled, permute_ranks
from bapipe.schedules.table import Schedule
from bapipe.simulator.allreduce import LastBackward, reduce_buckets
from bapipe.simulator.compiled import CompiledSchedule, compile_schedule
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.simulate import finish_ns, longest_path_is_exact, simulate_schedule
from bapipe.simulator.stage_cost import Stage
from bapipe.simulator.timeline import Timeline

MAX_CACHED_SCHEDULES = 500
"""Compiled tables that a problem keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """The pipelines over certain devices.

    Attributes:
        devices: how many.
        first: the slots that can come first.
        least_ns: a time no step beats.
        num_places: devices, where these have several stages, else 0.
    """

    devices: int
    first: tuple[StagePlacement, ...]
    least_ns: int
    num_places: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An answer to a problem: where the chain is cut, and the slot of each stage.

    Stage s holds the layers cuts[s] to cuts[s+1], the last one left out.
    """

    cuts: tuple[int, ...]
    slots: tuple[StagePlacement, ...]
    recompute: tuple[bool, ...]


class Problem:
    """A schedule at one micro-batch size, on the devices of a cluster.

    Attributes:
        chains: the layers as each class of devices runs them.
        starts: the pipelines to choose from.
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
        slots: PlacementGraph,
        bounds: LowerBound,
        starts: Sequence[Root],
    ) -> None:
        self.cluster, self.classes, self.chains = cluster, tuple(classes), tuple(chains)
        self.schedule, self.microbatch_size, self.num_microbatches = schedule, microbatch_size, num_microbatches
        self.slots, self.bounds, self.starts = slots, bounds, tuple(starts)
        self.may_not_fit = len({chain.profile_name for chain in chains}) > 1  # sizes of tensors differ by kind
        self._tables: dict[tuple[StagePlacement, ...], tuple[Schedule, CompiledSchedule]] = {}
        self._programs: dict[tuple[tuple[int, ...], int], tuple[Schedule, CompiledSchedule]] = {}

    @property
    def cuts(self) -> tuple[int, ...]:
        """The layers before which the chain may be cut, its start and its end."""
        return self.bounds.pieces.grid.cuts

    def on(self, num_devices: int) -> "Problem":
        """Returns the problem on so many devices only; what is known of its bounds and tables stays."""
        fewer = copy(self)
        fewer.starts = tuple(start for start in self.starts if start.devices == num_devices)
        return fewer

    def layout(self, places: Sequence[int], slots: tuple[StagePlacement, ...]) -> Layout:
        """Returns the layout with stages between places of the grid; stages recompute where they must."""
        again = []
        for slot, (start, stop) in zip(slots, pairwise(places), strict=True):
            again.append(bool(self.bounds.pieces.row(slot, start).recompute[stop - start - 1]))
        return Layout(cuts=tuple(self.cuts[place] for place in places), slots=slots, recompute=tuple(again))

    def ranks(self, slots: Sequence[StagePlacement]) -> tuple[tuple[int, ...], ...]:
        """Returns the devices of each stage: of a class, those first in the cluster first."""
        left = [iter(own.ranks) for own in self.classes]
        at_place: dict[int, int] = {}
        found = []
        for slot in slots:
            if slot.place is None:
                found.append(tuple(next(left[c]) for c in slot.devices))
                continue
            if slot.place not in at_place:
                at_place[slot.place] = next(left[slot.devices[0]])
            found.append((at_place[slot.place],))
        return tuple(found)

    def table(self, slots: tuple[StagePlacement, ...]) -> tuple[Schedule, CompiledSchedule]:
        """Returns the schedule on the slots' devices, and its program."""
        if slots not in self._tables:
            if len(self._tables) >= MAX_CACHED_SCHEDULES:
                self._tables.clear()
            ranks = self.ranks(slots)
            order = [rank for own in ranks for rank in own]  # of the devices in the table as it was made
            if slots[0].place is not None:
                order = [rank for _, rank in sorted({(s.place, own[0]) for s, own in zip(slots, ranks, strict=True)})]
            table, program = self._made(slots, len(order))
            num_ranks = len(self.cluster.devices)
            self._tables[slots] = permute_ranks(table, order, num_ranks), permute_compiled(program, order, num_ranks)
        return self._tables[slots]

    def _made(self, slots: Sequence[StagePlacement], num_devices: int) -> tuple[Schedule, CompiledSchedule]:
        """The schedule and its program on devices 0, 1, ...: the same for slots of the same sizes."""
        sizes = tuple(len(slot.devices) for slot in slots)
        if (sizes, num_devices) not in self._programs:
            table = self.slots.table(num_devices)
            if slots[0].place is None:
                ends = list(accumulate(sizes, initial=0))
                table = merge_stages(table, [tuple(range(a, b)) for a, b in pairwise(ends)], num_devices)
            self._programs[sizes, num_devices] = table, compile_schedule(table)
        return self._programs[sizes, num_devices]

    def stages(self, layout: Layout) -> tuple[Stage, ...]:
        """Returns the costs of the layout's stages."""
        return tuple(
            stage_on([self.chains[c] for c in slot.devices], start, stop, recompute=again)
            for slot, (start, stop), again in zip(layout.slots, pairwise(layout.cuts), layout.recompute, strict=True)
        )

    def lacks(self, layout: Layout) -> dict[int, int]:
        """Returns how much more than its limit each device needs, by the judge's count; negative where it fits."""
        table, _ = self.table(layout.slots)
        peaks = peak_memory(table, self.stages(layout))
        limit = {rank: own.limit_bytes for own in self.classes for rank in own.ranks}
        return {rank: peaks[rank].total - limit[rank] for rank in sorted({r for own in table.devices for r in own})}

    def fits(self, layout: Layout) -> bool:
        """Returns whether every device can hold its stages, where the bounds do not tell."""
        if layout.slots[0].place is None and not self.may_not_fit:
            return True
        return all(lack <= 0 for lack in self.lacks(layout).values())

    def is_fast(self, layout: Layout) -> bool:
        """Returns whether the judge's recurrence alone gives the step time: no shared link, no device that stalls."""
        return longest_path_is_exact(self.table(layout.slots)[1], self.cluster)

    def step_ns(self, layout: Layout) -> int:
        """Returns the judge's step time, without the rest of the timeline."""
        table, program = self.table(layout.slots)
        stages = self.stages(layout)
        if any(stage.tied_gradients for stage in stages):
            return self.judge(layout).step_ns
        done = finish_ns(program, stages, self.cluster)
        for stage, ranks in zip(stages, table.devices, strict=True):
            synced_ns = _synced_ns(stage, ranks, table, done, self.cluster)
            for cost, rank in zip(stage.costs, ranks, strict=True):
                done[rank] = max(done[rank], synced_ns) + cost.update_ns
        return max(done)

    def judge(self, layout: Layout) -> Timeline:
        """Returns the timeline of one step."""
        return simulate_schedule(self.table(layout.slots)[0], self.stages(layout), self.cluster)


def _synced_ns(stage: Stage, ranks: Sequence[int], table: Schedule, done: Sequence[int], cluster: Cluster) -> int:
    """Returns when the all-reduces of a stage are done, whose devices have no other stage."""
    if not stage.bucket_bytes:
        return 0
    last: list[LastBackward | None] = []
    for cost, rank in zip(stage.costs, ranks, strict=True):
        phase = table.order[rank][-1].phase if table.order[rank] else None
        last.append(None if phase is None else (done[rank] - cost.ns(phase), phase))
    return reduce_buckets(stage, ranks, last, cluster)[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found: the best layout of the best problem, and a bound that no layout of any problem beats.

    `lower_bound_ns == step_ns` proves the answer optimal.
    """

    problem: Problem
    layout: Layout
    step_ns: int
    lower_bound_ns: int
