"""The action order problem: fixed stages, one device each, as plain integers.

An order is written as codes, `3 * stage + phase` with F, I, W = 0, 1, 2: the k-th F of a stage is that of micro-batch
k, and so are its k-th I and W.

*Renaming lemma.* Because micro-batches cost the same, it is enough to search orders in which every stage runs them in
ascending order. Take the timeline of any legal table, read each B as an I immediately followed by its W (its gradient
is sent after the W), and rename: on every stage the k-th F, I and W, and the k-th transfer in each direction, become
those of micro-batch k. No action changes its start time. Dependencies still hold: each F waited for its own transfer,
so k transfers had arrived before the k-th F began, hence the k-th arrival is early enough; the same argument covers a
transfer and the action that sends it, F and I, I of a stage and I of the stage before, and I and W. Memory is the same:
what a device holds depends only on how many F, I and W have begun and ended. So the renamed timeline keeps every rule
of the simulator but one: its actions and transfers may be idle when the simulator would start them at once.

That last rule matters only if idling can pay. If every device overlaps transfers and no two cuts, nor the two
directions of one cut, share a link, the simulator starts everything at the earliest time of any timeline with these
orders. Such a problem is *monotone*, and its best order of codes is its best table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bapipe.formats.cluster import Cluster
from bapipe.schedules.table import Action, Phase, Schedule
from bapipe.simulator.in_flight import RETURNED, TAKEN, in_flight_bytes
from bapipe.simulator.memory import kept_bytes, peak_memory, recomputed_bytes
from bapipe.simulator.stage import Stage

F, I, W = 0, 1, 2  # noqa: E741
PHASES = (Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)

Orders = tuple[tuple[int, ...], ...]
"""The codes that each rank runs, in order; [ranks][actions of the rank]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProblem:
    """The stages of a pipeline and what constrains their order.

    Attributes:
        rank_of: the device of each stage.
        num_ranks: devices of the cluster, including those without a stage.
        action_ns: the time of one action of each code; [3 * stages].
        send_ns, return_ns: transfer of a micro-batch from each stage to the next, and back; 0 for the last stage.
        update_ns: by rank, the updates after its last action.
        stash_bytes: by stage, held per micro-batch from the start of F to the end of W.
        weight_grad_stash_bytes: by stage, held in addition from the start of I to the end of W: what I leaves for W,
            and with recomputation the full stash.
        workspace_bytes: by stage, held while one of its actions runs.
        available_bytes: by rank, the memory available for the three above.
        overlaps_transfers: by rank, whether it computes while it transfers.
        taken_bytes, returned_bytes: by code, the bytes that an action adds to the stashes when it starts, and removes
            when it ends.
    """

    rank_of: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    action_ns: tuple[int, ...]
    send_ns: tuple[int, ...]
    return_ns: tuple[int, ...]
    update_ns: tuple[int, ...]
    stash_bytes: tuple[int, ...]
    weight_grad_stash_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    available_bytes: tuple[int, ...]
    overlaps_transfers: tuple[bool, ...]
    taken_bytes: tuple[int, ...] = field(init=False)
    returned_bytes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name, changes in (("taken_bytes", TAKEN), ("returned_bytes", RETURNED)):
            num_bytes = tuple(
                # Every backward is an I and a W: memory of recomputation from I to W counts with the gradients I leaves
                # for W.
                in_flight_bytes(changes[phase], kept, 0, besides)
                for kept, besides in zip(self.stash_bytes, self.weight_grad_stash_bytes, strict=True)
                for phase in PHASES
            )
            object.__setattr__(self, name, num_bytes)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def num_actions(self) -> int:
        return 3 * self.num_stages * self.num_microbatches

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of a device, ascending."""
        return tuple(s for s, device in enumerate(self.rank_of) if device == rank)

    def links(self) -> dict[tuple[int, int], list[tuple[int, bool]]]:
        """Returns (sending stage, is forward) of the kinds of transfers on each link, an ordered pair of devices."""
        links: dict[tuple[int, int], list[tuple[int, bool]]] = {}
        for s in range(self.num_stages - 1):
            here, there = self.rank_of[s], self.rank_of[s + 1]
            if self.send_ns[s]:
                links.setdefault((here, there), []).append((s, True))
            if self.return_ns[s]:
                links.setdefault((there, here), []).append((s + 1, False))
        return links

    @property
    def is_monotone(self) -> bool:
        """Whether idling never pays: each kind of transfer has its own link, and does not block its devices."""
        links = self.links()
        return all(len(kinds) == 1 for kinds in links.values()) and all(
            self.overlaps_transfers[rank] for link in links for rank in link
        )

    def max_in_flight(self, stage: int) -> int:
        """Returns how many micro-batches a stage that is alone on its device can have between F and the end of W.

        Exactly so many: as many F may run, then their I and W. 0 if not even one fits, with its I and W; then only a
        table with B may fit, which needs no memory for what I leaves for W (see `relaxation`).
        """
        forward_bytes, input_grad_bytes = self.taken_bytes[3 * stage + F], self.taken_bytes[3 * stage + I]
        if forward_bytes == 0:
            return self.num_microbatches
        # However many are held at some instant, they still are while the next W runs: each has the bytes of its F, the
        # one that the W is of also those of its I, and there is a workspace.
        available = self.available_bytes[self.rank_of[stage]] - input_grad_bytes - self.workspace_bytes[stage]
        return max(0, min(self.num_microbatches, available // forward_bytes))

    def fits(self, orders: Orders) -> bool:
        """Whether every device stays within its memory, by the simulator's rules. O(n) for n actions."""
        return all(self.rank_fits(rank, codes) for rank, codes in enumerate(orders))

    def rank_fits(self, rank: int, codes: Sequence[int]) -> bool:
        """Whether one device stays within its memory; the rule of `bapipe.simulator.memory.rank_memory` on codes."""
        num_bytes = 0
        for code in codes:
            num_bytes += self.taken_bytes[code]
            # The workspace is needed while the action runs, together with what it adds.
            if num_bytes + self.workspace_bytes[code // 3] > self.available_bytes[rank]:
                return False
            num_bytes -= self.returned_bytes[code]
        return True

    def is_phase_ordered(self, codes: Sequence[int]) -> bool:
        """Whether on one device every I comes after its F, and every W after its I."""
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
    """Returns a schedule as codes: its micro-batches are renamed (renaming lemma), its B read as I and W."""
    codes = {Phase.FORWARD: (F,), Phase.BACKWARD: (I, W), Phase.INPUT_GRAD: (I,), Phase.WEIGHT_GRAD: (W,)}
    return tuple(
        tuple(3 * action.stage + phase for action in actions for phase in codes[action.phase])
        for actions in schedule.order
    )


def sequential_schedule(devices: tuple[tuple[int, ...], ...], num_microbatches: int, num_ranks: int) -> Schedule:
    """Returns the table that runs one micro-batch after another; no table needs less memory on any device.

    While a stage runs F or B of a micro-batch, every table holds the stashes of that micro-batch of the earlier stages
    on the same device, because their backward comes later. This table holds those and nothing else.
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
    """Returns the problem for stages of one device each.

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
    # The memory of the sequential schedule besides stashes and workspace is the same under every order.
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
        action_ns=tuple(ns for cost in costs for ns in (cost.forward_ns, cost.input_grad_ns, cost.weight_grad_ns)),
        send_ns=(*(transfer(s, s + 1, stages[s].send_bytes) for s in inner), 0),
        return_ns=(*(transfer(s + 1, s, stages[s].grad_bytes) for s in inner), 0),
        update_ns=tuple(
            sum(cost.update_ns for cost, device in zip(costs, rank_of, strict=True) if device == rank)
            for rank in range(num_ranks)
        ),
        stash_bytes=tuple(kept_bytes(stages, s) for s in range(len(stages))),
        weight_grad_stash_bytes=tuple(
            recomputed_bytes(stages, s) + cost.gradient_stash_bytes for s, cost in enumerate(costs)
        ),
        workspace_bytes=tuple(cost.workspace_bytes for cost in costs),
        available_bytes=tuple(
            memory_bytes[rank] - (memory.params + memory.gradients + memory.optimizer + memory.buffers)
            for rank, memory in enumerate(fixed)
        ),
        overlaps_transfers=tuple(device.overlaps_transfers for device in cluster.devices),
    )


def relaxation(problem: OrderProblem, stages: Sequence[Stage]) -> OrderProblem:
    """Returns a relaxation: I and W of a stage together take no longer, and hold no more, than its B.

    For every table with B, I and W there is an order of the relaxation that is at least as fast and fits, so a lower
    bound on the relaxation holds for tables that run B as one action too.
    """
    ns: list[int] = []
    for cost in (stage.costs[0] for stage in stages):
        # Split the B so that I is as short as either measurement allows, and W takes the remainder.
        input_grad_ns = min(cost.input_grad_ns, cost.backward_ns)
        ns += [cost.forward_ns, input_grad_ns, cost.min_backward_ns - input_grad_ns]
    weight_grad_stash_bytes = tuple(recomputed_bytes(stages, s) for s in range(len(stages)))
    return replace(problem, action_ns=tuple(ns), weight_grad_stash_bytes=weight_grad_stash_bytes)
