"""One question to a search: where to cut the layers, for given devices, micro-batch size and schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from bapipe.cluster import Cluster
from bapipe.cost import Stage, StageCost
from bapipe.memory import peak_memory
from bapipe.recurrence import Program, compile_table
from bapipe.schedule import Action, Phase, Schedule
from bapipe.schedules import SCHEDULES
from bapipe.search.chain import Chain
from bapipe.simulate import finish_ns, judge
from bapipe.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Cut a chain of layers into one stage for each of `ranks`.

    Attributes:
        chains: the layers as the device of each stage runs them.
        ranks: the device of each stage, as its place in the cluster.
        memory_bytes: what each stage's device may hold.
        schedule: a name in `SCHEDULES`.

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
        return len(self.ranks)

    @property
    def num_layers(self) -> int:
        return self.chains[0].num_layers

    @cached_property
    def table(self) -> Schedule:
        """The schedule on the problem's devices."""
        schedule = SCHEDULES[self.schedule](self.num_stages, self.num_microbatches)
        return spread(schedule, tuple((rank,) for rank in self.ranks), len(self.cluster.devices))

    @cached_property
    def program(self) -> Program:
        """The table, compiled once for all cuts."""
        return compile_table(self.table)

    @cached_property
    def fast(self) -> bool:
        """Whether the judge's recurrence alone gives the step time: no shared link, no device that stalls."""
        return self.program.exact and all(device.overlaps_transfers for device in self.cluster.devices)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the schedule runs I and W apart."""
        return any(action.phase is Phase.INPUT_GRAD for order in self.table.order for action in order)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches that each stage stashes at its peak, by the judge's own count of one-byte stashes."""
        return tuple(_most_in_flight(self.table, s) for s in range(self.num_stages))

    def peak_bytes(self, stage: int, start: int, stop: int) -> int:
        """Returns what the device of a stage holds at its peak with layers `start` to `stop`."""
        cost = self.chains[stage].cost(start, stop)
        incoming = self.chains[stage - 1].send_bytes[start] if stage > 0 else 0
        returning = self.chains[stage].grad_bytes[stop]
        return (
            2 * cost.param_bytes
            + cost.optimizer_bytes
            + self.in_flight[stage] * cost.stash_bytes
            + cost.workspace_bytes
            + self.num_microbatches * (incoming + returning)
        )

    def transfer_ns(self, stage: int, cut: int) -> tuple[int, int]:
        """Returns the times of activations and gradients between a stage and the next, cut before layer `cut`."""
        if stage + 1 == self.num_stages:
            return 0, 0
        here, there = self.ranks[stage], self.ranks[stage + 1]
        send, grad = self.chains[stage].send_bytes[cut], self.chains[stage].grad_bytes[cut]
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
            for s, chain in enumerate(self.chains)
        )

    def step_ns(self, cuts: Sequence[int]) -> int:
        """Returns the judge's step time under these cuts, without the rest of the timeline."""
        if not self.fast:
            return self.judge(cuts).step_ns
        stages = self.stages(cuts)
        finish = finish_ns(self.program, stages, self.cluster)
        return max(finish[rank] + stage.on[0].update_ns for rank, stage in zip(self.ranks, stages, strict=True))

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


def _most_in_flight(table: Schedule, stage: int) -> int:
    byte = Stage(on=(StageCost(forward_ns=0, input_grad_ns=0, weight_grad_ns=0, stash_bytes=1),))
    return peak_memory(table, [byte] * table.num_stages)[table.devices[stage][0]].stash
