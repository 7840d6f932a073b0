"""One question to a search: where to cut the layers, for given devices, micro-batch size and schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from bapipe.cluster import Cluster
from bapipe.cost import Stage, StageCost
from bapipe.memory import memory_over_time, peak_memory
from bapipe.recurrence import Program, compile_table
from bapipe.schedule import Action, Phase, Schedule
from bapipe.schedules import ALL
from bapipe.search.chain import Chain
from bapipe.simulate import finish_ns, judge, needs_no_queue
from bapipe.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Cut a chain of layers into the stages of a schedule.

    Attributes:
        chains: the layers as each of the devices runs them.
        ranks: the devices, as their places in the cluster.
        memory_bytes: what each of the devices may hold.
        schedule: a name in `SCHEDULES` or `LOOPED`.

    Cuts are given as (0, ..., num_layers): stage s holds the layers cuts[s] to cuts[s+1], the last one left out.
    """

    chains: tuple[Chain, ...]
    ranks: tuple[int, ...]
    cluster: Cluster
    memory_bytes: tuple[int, ...]
    schedule: str
    microbatch_size: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return self.table.num_stages

    @property
    def num_layers(self) -> int:
        return self.chains[0].num_layers

    @cached_property
    def legal_cuts(self) -> tuple[int, ...]:
        """The layers before which the chain may be cut, ascending."""
        return tuple(cut for cut in range(1, self.num_layers) if self.chains[0].legal[cut])

    @cached_property
    def table(self) -> Schedule:
        """The schedule on the problem's devices."""
        return place(ALL[self.schedule](len(self.ranks), self.num_microbatches), self.ranks, len(self.cluster.devices))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The device of each stage, as its place in `ranks`."""
        return tuple(self.ranks.index(devices[0]) for devices in self.table.devices)

    @property
    def looped(self) -> bool:
        """Whether devices have several stages."""
        return self.num_stages > len(self.ranks)

    @cached_property
    def program(self) -> Program:
        """The table, compiled once for all cuts."""
        return compile_table(self.table)

    @cached_property
    def fast(self) -> bool:
        """Whether the judge's recurrence alone gives the step time: no shared link, no device that stalls."""
        return needs_no_queue(self.program, self.cluster)

    @cached_property
    def least_ns(self) -> int:
        """A time no step beats: all layers shared out in proportion to what each device takes for all of them.

        Stages' times are rounded, so each may be up to a nanosecond a phase shorter than its layers'.
        """
        wholes = [chain.cost(0, self.num_layers) for chain in self.chains]
        times = [max(cost.forward_ns + cost.least_backward_ns, 1) for cost in wholes]
        share = 1 / sum(Fraction(1, time_ns) for time_ns in times)
        return max(0, int(self.num_microbatches * share) - 3 * self.num_microbatches * self.num_stages)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the schedule runs I and W apart."""
        return any(action.phase is Phase.INPUT_GRAD for order in self.table.order for action in order)

    @cached_property
    def in_flight(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each stage, how many stashes and how many I's leavings it holds at once, where neither can be less.

        By the judge's own count of one-byte stashes.
        """
        return tuple(_most_in_flight(self.table, s) for s in range(self.num_stages))

    def peak_bytes(self, stage: int, start: int, stop: int) -> int:
        """Returns what the device of a stage holds at its peak for it alone, with layers `start` to `stop`."""
        place = self.places[stage]
        chain = self.chains[place]
        cost = chain.cost(start, stop)
        before = self.places[stage - 1] if stage > 0 else place
        after = self.places[stage + 1] if stage + 1 < self.num_stages else place
        incoming = self.chains[before].send_bytes[start] if before != place else 0
        returning = chain.grad_bytes[stop] if after != place else 0
        return (
            2 * cost.param_bytes
            + cost.optimizer_bytes
            + max(f * cost.stash_bytes + i * cost.gradient_stash_bytes for f, i in self.in_flight[stage])
            + cost.workspace_bytes
            + self.num_microbatches * (incoming + returning)
        )

    def transfer_ns(self, stage: int, cut: int) -> tuple[int, int]:
        """Returns the times of activations and gradients between a stage and the next, cut before layer `cut`."""
        if stage + 1 == self.num_stages or self.places[stage] == self.places[stage + 1]:
            return 0, 0
        here, there = self.ranks[self.places[stage]], self.ranks[self.places[stage + 1]]
        chain = self.chains[self.places[stage]]
        send, grad = chain.send_bytes[cut], chain.grad_bytes[cut]
        return (
            self.cluster.link(here, there).transfer_ns(send) if send else 0,
            self.cluster.link(there, here).transfer_ns(grad) if grad else 0,
        )

    def stages(self, cuts: Sequence[int]) -> tuple[Stage, ...]:
        """Returns the stages that the cuts make."""
        return tuple(
            Stage(
                on=(chain.cost(cuts[s], cuts[s + 1]),),
                send_bytes=chain.send_bytes[cuts[s + 1]],
                grad_bytes=chain.grad_bytes[cuts[s + 1]],
            )
            for s, chain in enumerate(self.chains[place] for place in self.places)
        )

    def fits(self, cuts: Sequence[int]) -> bool:
        """Returns whether every device can hold its stages, by the judge's count."""
        peaks = peak_memory(self.table, self.stages(cuts))
        return all(peaks[rank].total <= limit for rank, limit in zip(self.ranks, self.memory_bytes, strict=True))

    def step_ns(self, cuts: Sequence[int]) -> int:
        """Returns the judge's step time under these cuts, without the rest of the timeline."""
        stages = self.stages(cuts)
        done = finish_ns(self.table, self.program, stages, self.cluster)
        for place, stage in zip(self.places, stages, strict=True):
            done[self.ranks[place]] += stage.on[0].update_ns
        return max(done)

    def judge(self, cuts: Sequence[int]) -> Timeline:
        """Returns the timeline of one step under these cuts."""
        return judge(self.table, self.stages(cuts), self.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found: the best cuts of the best problem, and a bound that no cut of any problem beats.

    `lower_bound_ns == step_ns` proves the answer optimal.
    """

    problem: Problem
    cuts: tuple[int, ...]
    step_ns: int
    lower_bound_ns: int


def spread(schedule: Schedule, devices: tuple[tuple[int, ...], ...], num_ranks: int) -> Schedule:
    """Returns a schedule of one device a stage on other devices, several a stage taking micro-batches in turn.

    Each device keeps the order in which its stage's actions come; a device must not have two stages.
    """
    order: list[list[Action]] = [[] for _ in range(num_ranks)]
    for actions in schedule.order:
        for action in actions:
            replicas = devices[action.stage]
            order[replicas[action.microbatch % len(replicas)]].append(action)
    return Schedule(
        devices=devices,
        num_microbatches=schedule.num_microbatches,
        order=tuple(tuple(actions) for actions in order),
    )


def place(schedule: Schedule, ranks: Sequence[int], num_ranks: int) -> Schedule:
    """Returns a schedule with its rank i as rank `ranks[i]` of `num_ranks`."""
    order: list[tuple[Action, ...]] = [()] * num_ranks
    for rank, actions in zip(ranks, schedule.order, strict=True):
        order[rank] = actions
    return Schedule(
        devices=tuple(tuple(ranks[own] for own in devices) for devices in schedule.devices),
        num_microbatches=schedule.num_microbatches,
        order=tuple(order),
    )


def _most_in_flight(table: Schedule, stage: int) -> tuple[tuple[int, int], ...]:
    cost = StageCost(forward_ns=0, input_grad_ns=0, weight_grad_ns=0)
    counts = []
    for unit in (replace(cost, stash_bytes=1), replace(cost, gradient_stash_bytes=1)):
        stages = [Stage(on=(cost,))] * table.num_stages
        stages[stage] = Stage(on=(unit,))
        counts.append([held.stash for held in memory_over_time(table, stages)[table.devices[stage][0]]])
    pairs = set(zip(*counts, strict=True))
    return tuple(sorted(p for p in pairs if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in pairs)))
