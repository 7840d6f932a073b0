"""One question to the searches of an order: fixed stages, one device each, as plain integers.

An order is written as codes, `3 * stage + phase` with F, I, W = 0, 1, 2: the k-th F of a stage is that of micro-batch
k, and so are its k-th I and W. Micro-batches cost the same, so nothing is lost by it. Take the timeline of any legal
table, read a B as I with W right behind it and its gradient sent late, and rename: on every stage the k-th F, I and W
and the k-th transfer each way become those of micro-batch k. Every action keeps its slot. If each F waited for its own
transfer, then k transfers had arrived before the k-th F began, so the k-th arrival is early enough; the same holds of a
transfer and its action, I and F, I and I one stage on, W and I. What a device holds at any time is a count of F, I and
W begun and ended, which renaming does not change. So the renamed timeline keeps the judge's rules but for one: its
transfers and actions may wait where the judge's do not.

That last rule matters only where waiting can pay. Where every device overlaps transfers and no two cuts, nor the two
directions of one cut, share a link, the judge starts everything at the earliest time of any timeline with these orders:
such a problem is `monotone`, and its best order of codes is its best table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bapipe.formats.cluster import Cluster
from bapipe.schedules.table import Action, Phase, Schedule
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.stage_cost import Stage

F, I, W = 0, 1, 2  # noqa: E741
PHASES = (Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)

Orders = tuple[tuple[int, ...], ...]
"""Codes by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProblem:
    """The stages of a pipeline and what bounds their order.

    Attributes:
        rank_of: the device of each stage.
        num_ranks: devices of the cluster, those without a stage too.
        ns: the time of each code.
        send_ns, return_ns: transfers of a micro-batch from each stage to the next, and back; 0 for the last stage.
        update_ns: by rank, the updates after its last action.
        kept_bytes: by stage, held from F to the end of W.
        whole_bytes: by stage, held from I to the end of W besides: what I leaves, and a whole stash with recompute.
        workspace_bytes: by stage, held while an action runs.
        room_bytes: by rank, what is left for the three above.
        overlaps: by rank, whether it computes while it transfers.
    """

    rank_of: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    ns: tuple[int, ...]
    send_ns: tuple[int, ...]
    return_ns: tuple[int, ...]
    update_ns: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    whole_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    room_bytes: tuple[int, ...]
    overlaps: tuple[bool, ...]

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def num_actions(self) -> int:
        return 3 * self.num_stages * self.num_microbatches

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of a device, ascending."""
        return tuple(s for s, own in enumerate(self.rank_of) if own == rank)

    def links(self) -> dict[tuple[int, int], list[tuple[int, bool]]]:
        """Returns (sending stage, is forward) of the transfers of each ordered pair of devices."""
        links: dict[tuple[int, int], list[tuple[int, bool]]] = {}
        for s in range(self.num_stages - 1):
            here, there = self.rank_of[s], self.rank_of[s + 1]
            if self.send_ns[s]:
                links.setdefault((here, there), []).append((s, True))
            if self.return_ns[s]:
                links.setdefault((there, here), []).append((s + 1, False))
        return links

    @property
    def monotone(self) -> bool:
        """Whether waiting never pays: every transfer has a link of its own and leaves its devices free."""
        links = self.links()
        return all(len(kinds) == 1 for kinds in links.values()) and all(
            self.overlaps[rank] for link in links for rank in link
        )

    def depth(self, stage: int) -> int:
        """Returns how many micro-batches a stage alone on its device can have between F and the end of W."""
        kept = self.kept_bytes[stage]
        if kept == 0:
            return self.num_microbatches
        room = self.room_bytes[self.rank_of[stage]] - self.whole_bytes[stage] - self.workspace_bytes[stage]
        return min(self.num_microbatches, room // kept)

    def fits(self, orders: Orders) -> bool:
        """Whether every device keeps within its room, by the judge's rules. O(n) for n actions."""
        return all(self.rank_fits(rank, codes) for rank, codes in enumerate(orders))

    def rank_fits(self, rank: int, codes: Sequence[int]) -> bool:
        """Whether one device keeps within its room."""
        held, room = 0, self.room_bytes[rank]
        for code in codes:
            stage, phase = divmod(code, 3)
            if phase == F:
                held += self.kept_bytes[stage]
            elif phase == I:
                held += self.whole_bytes[stage]
            if held + self.workspace_bytes[stage] > room:
                return False
            if phase == W:
                held -= self.kept_bytes[stage] + self.whole_bytes[stage]
        return True

    def in_sequence(self, codes: Sequence[int]) -> bool:
        """Whether every I comes after its F and every W after its I."""
        done = [0] * (3 * self.num_stages)
        for code in codes:
            if code % 3 and done[code] >= done[code - 1]:
                return False
            done[code] += 1
        return True

    def table(self, devices: tuple[tuple[int, ...], ...], orders: Orders) -> Schedule:
        """Returns the orders as a schedule that splits every backward into I and W."""
        done = [0] * (3 * self.num_stages)
        order: list[tuple[Action, ...]] = []
        for codes in orders:
            actions = []
            for code in codes:
                actions.append(Action(code // 3, PHASES[code % 3], done[code]))
                done[code] += 1
            order.append(tuple(actions))
        return Schedule(devices=devices, num_microbatches=self.num_microbatches, order=tuple(order))


def orders_of(schedule: Schedule) -> Orders:
    """Returns a schedule as codes, its micro-batches renamed as the head of this file says."""
    codes = {Phase.FORWARD: (F,), Phase.BACKWARD: (I, W), Phase.INPUT_GRAD: (I,), Phase.WEIGHT_GRAD: (W,)}
    return tuple(
        tuple(3 * action.stage + phase for action in actions for phase in codes[action.phase])
        for actions in schedule.order
    )


def sequential_schedule(devices: tuple[tuple[int, ...], ...], num_microbatches: int, num_ranks: int) -> Schedule:
    """Returns the table that ends every micro-batch before the next; no table needs less memory on any device.

    While a stage runs F or B of a micro-batch, every table holds what the earlier stages on the same device keep of
    that micro-batch, since their backward is yet to come. This table holds that and nothing else.
    """
    order: list[list[Action]] = [[] for _ in range(num_ranks)]
    for microbatch in range(num_microbatches):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            stages = range(len(devices)) if phase is Phase.FORWARD else reversed(range(len(devices)))
            for stage in stages:
                order[devices[stage][0]].append(Action(stage, phase, microbatch))
    return Schedule(devices=devices, num_microbatches=num_microbatches, order=tuple(tuple(a) for a in order))


def order_problem(
    stages: Sequence[Stage],
    devices: tuple[tuple[int, ...], ...],
    cluster: Cluster,
    num_microbatches: int,
    memory_bytes: Sequence[int],
) -> OrderProblem:
    """Returns the question for stages of one device each.

    Raises:
        ValueError: a stage with several devices, devices that run side by side, or lists whose lengths do not match.
    """
    num_ranks = len(cluster.devices)
    if len(devices) != len(stages) or len(memory_bytes) != num_ranks:
        raise ValueError(
            f"{len(stages)} stages, {len(devices)} lists of devices; {num_ranks} devices, {len(memory_bytes)} memories"
        )
    for s, replicas in enumerate(devices):
        if len(replicas) != 1 or len(stages[s].costs) != 1:
            raise ValueError(f"stage {s} has devices {replicas}; an order is searched for one device a stage")
    if any(device.side_by_side for device in cluster.devices):
        raise ValueError("an order is searched for devices that run one action at a time")
    rank_of = tuple(replicas[0] for replicas in devices)
    fixed = peak_memory(sequential_schedule(devices, num_microbatches, num_ranks), stages)
    costs = [stage.costs[0] for stage in stages]

    def transfer(source: int, target: int, num_bytes: int) -> int:
        here, there = rank_of[source], rank_of[target]
        return cluster.link(here, there).transfer_ns(num_bytes) if num_bytes and here != there else 0

    inner = range(len(stages) - 1)
    return OrderProblem(
        rank_of=rank_of,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        ns=tuple(ns for cost in costs for ns in (cost.forward_ns, cost.input_grad_ns, cost.weight_grad_ns)),
        send_ns=(*(transfer(s, s + 1, stages[s].send_bytes) for s in inner), 0),
        return_ns=(*(transfer(s + 1, s, stages[s].grad_bytes) for s in inner), 0),
        update_ns=tuple(
            sum(cost.update_ns for cost, own in zip(costs, rank_of, strict=True) if own == rank)
            for rank in range(num_ranks)
        ),
        kept_bytes=tuple(_kept_bytes(s, stages) for s in range(len(stages))),
        whole_bytes=tuple(
            (cost.stash_bytes if stage.recompute else 0) + cost.gradient_stash_bytes
            for stage, cost in zip(stages, costs, strict=True)
        ),
        workspace_bytes=tuple(cost.workspace_bytes for cost in costs),
        room_bytes=tuple(
            memory_bytes[rank] - (held.params + held.gradients + held.optimizer + held.buffers)
            for rank, held in enumerate(fixed)
        ),
        overlaps=tuple(device.overlaps_transfers for device in cluster.devices),
    )


def relaxation(problem: OrderProblem, stages: Sequence[Stage]) -> OrderProblem:
    """Returns the problem whose I and W take no longer, and hold no more, than the B of the same stage.

    A table that uses B where that is shorter or needs less is no faster than one of this problem's.
    """
    ns: list[int] = []
    for cost in (stage.costs[0] for stage in stages):
        input_grad_ns = min(cost.input_grad_ns, cost.backward_ns)
        ns += [cost.forward_ns, input_grad_ns, cost.min_backward_ns - input_grad_ns]
    whole_bytes = tuple(stage.costs[0].stash_bytes if stage.recompute else 0 for stage in stages)
    return replace(problem, ns=tuple(ns), whole_bytes=whole_bytes)


def _kept_bytes(s: int, stages: Sequence[Stage]) -> int:
    if not stages[s].recompute:
        return stages[s].costs[0].stash_bytes
    return stages[s - 1].send_bytes if s > 0 else 0
