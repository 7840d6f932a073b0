"""Random small pipelines of one device a stage, the same for the same seed."""

from dataclasses import dataclass
from random import Random

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.schedules.table import Action, Phase, Schedule
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.stage import Stage, StageCost


@dataclass(frozen=True)
class Pipeline:
    """The arguments of `search_order`."""

    stages: tuple[Stage, ...]
    devices: tuple[tuple[int, ...], ...]
    cluster: Cluster
    num_microbatches: int
    memory_bytes: list[int]


def random_pipeline(
    random: Random,
    ranks: tuple[int, ...],
    num_microbatches: int,
    *,
    wires: bool = True,
    overlaps: bool = True,
    splits_badly: bool = False,
    tight: bool = False,
) -> Pipeline:
    """Stage s on rank ranks[s]; times small enough that ties are common, memory from too little to plenty.

    If `tight`, memory is often just enough for one micro-batch after another with B, and workspaces, and what I leaves
    for W if `splits_badly`, are of all sizes, up to some stashes.
    """
    last = len(ranks) - 1
    stages = tuple(
        Stage(
            costs=(_cost(random, splits_badly, 40 if tight else None),),
            send_bytes=random.choice([0, random.randrange(1, 9)]) if s < last else 0,
            grad_bytes=random.choice([0, random.randrange(1, 9)]) if s < last else 0,
            recompute=random.random() < 0.25,
        )
        for s in range(len(ranks))
    )
    num_ranks = max(ranks) + 1 + (random.random() < 0.2)
    names = [f"d{rank}" for rank in range(num_ranks)]
    speed = Bandwidth(bytes_per_s=random.choice([10**9, 3 * 10**8]), latency_ns=random.randrange(8))
    cluster = Cluster(
        devices=tuple(
            Device(name=name, host="h", kind="a", memory_bytes=0, overlaps_transfers=overlaps or random.random() < 0.4)
            for name in names
        ),
        intra_host=speed if wires else Bandwidth(bytes_per_s=10**18, latency_ns=0),
        inter_host=speed,
    )
    if not wires:
        stages = tuple(Stage(costs=stage.costs, recompute=stage.recompute) for stage in stages)
    devices = tuple((rank,) for rank in ranks)
    least, most = (_peaks(stages, devices, num_ranks, num_microbatches, order) for order in (True, False))
    short = random.random() < 0.1
    if tight and random.random() < 0.4:
        most = least
    memory = [
        random.randint(low - short, max(low, high) + 2) if high else 0 for low, high in zip(least, most, strict=True)
    ]
    return Pipeline(stages, devices, cluster, num_microbatches, [max(0, num_bytes) for num_bytes in memory])


def _cost(random: Random, splits_badly: bool, most_bytes: int | None) -> StageCost:
    """The cost of a stage; `most_bytes` of what I leaves for W and of the workspace, None for a few."""
    return StageCost(
        whole_backward_ns=random.choice([None, random.randrange(20)]) if splits_badly else None,
        gradient_stash_bytes=random.choice([0, random.randrange(most_bytes or 5)]) if splits_badly else 0,
        forward_ns=random.randrange(10),
        input_grad_ns=random.randrange(10),
        weight_grad_ns=random.randrange(10),
        update_ns=random.choice([0, random.randrange(10)]),
        param_bytes=random.randrange(5),
        optimizer_bytes=random.randrange(5),
        stash_bytes=random.randrange(10),
        workspace_bytes=random.randrange(most_bytes or 4),
    )


def _peaks(stages, devices, num_ranks, num, sequential_schedule) -> list[int]:  # type: ignore[no-untyped-def]
    """Memory of each rank, micro-batches one after another or all at once."""
    down, up = range(len(stages)), range(len(stages) - 1, -1, -1)
    forward, backward = ([(s, Phase.FORWARD) for s in down], [(s, Phase.BACKWARD) for s in up])
    if sequential_schedule:
        actions = [Action(s, phase, m) for m in range(num) for s, phase in (*forward, *backward)]
    else:
        actions = [Action(s, phase, m) for half in (forward, backward) for s, phase in half for m in range(num)]
    order = tuple(tuple(a for a in actions if devices[a.stage][0] == rank) for rank in range(num_ranks))
    return [held.total for held in peak_memory(Schedule(devices=devices, num_microbatches=num, order=order), stages)]
