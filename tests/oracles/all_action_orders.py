"""The fastest legal table of a tiny pipeline by trying every one, written apart from the search.

`fastest_ns` appends one action at a time to any device, micro-batches in any order, B or I and W as it likes, and
remembers the states it has seen. It knows no link that carries two kinds of transfer and no transfer that stops a
device. `every_table` lists whole tables for the simulator where those matter.
"""

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

from bapipe.formats.cluster import Cluster
from bapipe.schedules.table import Action, Phase, Schedule
from bapipe.simulator.stage import Stage

Devices = tuple[tuple[int, ...], ...]
F, B, I, W = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD  # noqa: E741
NEXT = {"": [(F, "F")], "F": [(B, "W"), (I, "I")], "I": [(W, "W")], "W": []}
"""What a stage may do for a micro-batch after what it did last, and what it did last then."""


def fastest_ns(
    stages: tuple[Stage, ...], devices: Devices, cluster: Cluster, num: int, memory: list[int]
) -> int | None:
    """The least step time of all tables that fit, None where none does."""
    last = len(stages) - 1
    rank_of = [d[0] for d in devices]
    room = [memory[r] - static_bytes(r, stages, rank_of, num) for r in range(len(memory))]
    updates = [
        sum(stages[s].costs[0].update_ns for s in range(last + 1) if rank_of[s] == r) for r in range(len(memory))
    ]
    best: list[int | None] = [None]
    seen = set()

    def wire_ns(source: int, target: int, num_bytes: int) -> int:
        if rank_of[source] == rank_of[target] or not num_bytes:
            return 0
        return cluster.link(rank_of[source], rank_of[target]).transfer_ns(num_bytes)

    def extend(
        did: dict[Any, Any], here: dict[Any, Any], clocks: tuple[Any, ...], held: tuple[Any, ...], links: dict[Any, Any]
    ) -> None:
        key = (tuple(sorted(did.items())), tuple(sorted(here.items())), clocks, tuple(sorted(links.items())))
        if key in seen:
            return
        seen.add(key)
        left = [0] * len(clocks)
        for (s, _), state in did.items():
            c = stages[s].costs[0]
            backward = min(c.ns(B), c.input_grad_ns + c.weight_grad_ns)
            todo = {"": c.forward_ns + backward, "F": backward}
            left[rank_of[s]] += todo.get(state, c.weight_grad_ns if state == "I" else 0)
        least = max(clock + rest + update for clock, rest, update in zip(clocks, left, updates, strict=True))
        if best[0] is not None and least >= best[0]:
            return
        if all(state == "W" for state in did.values()):
            best[0] = least
            return
        for (s, m), state in did.items():
            for phase, becomes in NEXT[state]:
                if phase is F and s > 0 and (s, "F", m) not in here:
                    continue
                if phase in (B, I) and s < last and (s, "B", m) not in here:
                    continue
                if phase is F and s == last and any(did[s, k] == "" for k in range(m)):
                    continue
                r, cost = rank_of[s], stages[s].costs[0]
                kept = cost.stash_bytes
                if stages[s].recompute:
                    kept = stages[s - 1].send_bytes if s else 0
                whole = cost.stash_bytes if stages[s].recompute else 0
                now_held = held[r] + (kept if phase is F else 0) + (whole if phase in (B, I) else 0)
                now_held += cost.gradient_stash_bytes if phase is I else 0
                if now_held + cost.workspace_bytes > room[r]:
                    continue
                if phase in (B, W):
                    now_held -= kept + whole + (cost.gradient_stash_bytes if phase is W else 0)
                needed = here.get((s, "F" if phase is F else "B", m), 0) if phase is not W else 0
                end = max(clocks[r], needed) + cost.ns(phase)
                now_here, now_links = dict(here), dict(links)
                to = s + 1 if phase is F else s - 1
                if phase is not W and 0 <= to <= last:
                    num_bytes = stages[s].send_bytes if phase is F else stages[to].grad_bytes
                    wire = wire_ns(s, to, num_bytes)
                    arrival = end
                    if wire:
                        arrival = now_links[s, to] = max(end, links.get((s, to), 0)) + wire
                    now_here[to, "F" if phase is F else "B", m] = arrival
                extend(
                    did | {(s, m): becomes}, now_here, (*clocks[:r], end, *clocks[r + 1 :]),
                    (*held[:r], now_held, *held[r + 1 :]), now_links,
                )  # fmt: skip

    num_ranks = len(memory)
    did = {(s, m): "" for m in range(num) for s in range(last + 1)}
    extend(did, {}, (0,) * num_ranks, (0,) * num_ranks, {})
    return best[0]


def static_bytes(rank: int, stages: tuple[Stage, ...], rank_of: list[int], num: int) -> int:
    """Parameters, gradients, optimizer state, and one receive buffer a micro-batch and neighbour."""
    total = 0
    for s, stage in enumerate(stages):
        if rank_of[s] != rank:
            continue
        total += 2 * stage.costs[0].param_bytes + stage.costs[0].optimizer_bytes
        if s > 0 and rank_of[s - 1] != rank:
            total += num * stages[s - 1].send_bytes
        if s + 1 < len(stages) and rank_of[s + 1] != rank:
            total += num * stage.grad_bytes
    return total


def every_table(devices: Devices, num: int, num_ranks: int) -> Iterator[Schedule]:
    """Every complete table of one stage a device, those that deadlock too."""
    choices = []
    for rank in range(num_ranks):
        own = [s for s in range(len(devices)) if devices[s][0] == rank]
        choices.append([order for s in own for order in _every_order(s, s == len(devices) - 1, num)] or [()])
    for order in product(*choices):
        yield Schedule(devices=devices, num_microbatches=num, order=order)


def _every_order(s: int, last: bool, num: int) -> list[tuple[Action, ...]]:
    found = set()
    for splits in product([(F, B), (F, I, W)], repeat=num):
        slots = [m for m, phases in enumerate(splits) for _ in phases]
        for sequence in set(permutations(slots)):
            did = [0] * num
            order = []
            for m in sequence:
                order.append(Action(s, splits[m][did[m]], m))
                did[m] += 1
            forwards = [a.microbatch for a in order if a.phase is F]
            if not last or forwards == sorted(forwards):
                found.add(tuple(order))
    return sorted(found)
