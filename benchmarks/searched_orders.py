"""Searched orders against the best named schedule at equal memory: gain, gap to the bound, and seconds.

    python benchmarks/searched_orders.py [--ranks 8] [--microbatches 16] [--instances 10] [--effort 40] [--costs uneven]

Random pipelines with one stage per rank; a rank has memory for min(p, m) + 2 stashes besides its receive buffers.
`--costs even`: F, I and W of each stage lie within the spread around 10 ms, and transfers take 1 to 5 % of that, as
activations of a few MB do between hosts. `--costs uneven`: F is log-normal around 10 ms with the spread as its sigma, I
takes 0.7 to 1.3 and W 0.4 to 1.3 times as long, and the transfers of a cut take 1 to 20 % of 10 ms.
All times are simulated; no process runs.
"""

import time
from random import Random
from statistics import mean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.planner.action_order.search import search_order
from bapipe.schedules import SCHEDULES
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage import Stage, StageCost
from benchmarks import parser_of

MS = 10**6


def even(random: Random, num_ranks: int, spread: float) -> tuple[list[Stage], Cluster]:
    """Stages with stashes of 100 bytes, and ranks in a row; a transfer takes its latency."""

    def around() -> int:
        return round(10 * MS * random.uniform(1 - spread, 1 + spread))

    stages = [
        Stage(
            costs=(StageCost(forward_ns=around(), input_grad_ns=around(), weight_grad_ns=around(), stash_bytes=100),),
            send_bytes=1,
            grad_bytes=1,
        )
        for _ in range(num_ranks)
    ]
    return stages, in_a_row(num_ranks, Bandwidth(bytes_per_s=10**12, latency_ns=round(MS * random.uniform(0.1, 0.5))))


def uneven(random: Random, num_ranks: int, spread: float) -> tuple[list[Stage], Cluster]:
    """Stages with stashes of 100 bytes, and ranks in a row; a transfer takes one nanosecond per byte."""
    stages = []
    for _ in range(num_ranks):
        f = 10 * MS * random.lognormvariate(0, spread)
        cost = StageCost(
            forward_ns=round(f),
            input_grad_ns=round(f * random.uniform(0.7, 1.3)),
            weight_grad_ns=round(f * random.uniform(0.4, 1.3)),
            stash_bytes=100,
        )
        num_bytes = round(10 * MS * 10 ** random.uniform(-2, -0.7))
        stages.append(Stage(costs=(cost,), send_bytes=num_bytes, grad_bytes=num_bytes))
    return stages, in_a_row(num_ranks, Bandwidth(bytes_per_s=10**9, latency_ns=0))


def in_a_row(num_ranks: int, link: Bandwidth) -> Cluster:
    devices = tuple(Device(name=f"d{i}", host="h", kind="a", memory_bytes=0) for i in range(num_ranks))
    return Cluster(devices=devices, intra_host=link, inter_host=link)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--instances", type=int, default=10)
    parser.add_argument("--effort", type=float, default=40.0)
    parser.add_argument("--costs", choices=["even", "uneven"], default="even")
    parser.add_argument("--spread", type=float, default=0.3)
    args = parser.parse_args()
    p, m = args.ranks, args.microbatches

    table = Table(box=SIMPLE_HEAD)
    for column in ("instance", "best named", "its step ms", "searched ms", "gain", "gap to the bound", "seconds"):
        table.add_column(column, justify="left" if column == "best named" else "right")
    gains, gaps, seconds = [], [], []
    for instance in range(args.instances):
        stages, cluster = (even if args.costs == "even" else uneven)(Random(instance), p, args.spread)
        buffers = [rank.buffers for rank in peak_memory(SCHEDULES["1f1b"](p, m), stages)]
        limits = [num_bytes + 100 * (min(p, m) + 2) for num_bytes in buffers]
        step_ns_of = {}
        for name, build in SCHEDULES.items():
            timeline = simulate_schedule(build(p, m), stages, cluster)
            if all(memory.total <= limit for memory, limit in zip(timeline.memory, limits, strict=True)):
                step_ns_of[name] = timeline.step_ns
        best = min(step_ns_of, key=step_ns_of.__getitem__)
        start = time.perf_counter()
        result = search_order(
            stages,
            tuple((rank,) for rank in range(p)),
            cluster,
            num_microbatches=m,
            memory_bytes=limits,
            start=[SCHEDULES[name](p, m) for name in step_ns_of],
            effort=args.effort,
        )
        seconds.append(time.perf_counter() - start)
        assert result.step_ns is not None
        assert result.lower_bound_ns is not None
        gains.append(step_ns_of[best] / result.step_ns - 1)
        gaps.append(result.step_ns / result.lower_bound_ns - 1)
        steps = (f"{ns / MS:,.1f}" for ns in (step_ns_of[best], result.step_ns))
        table.add_row(str(instance), best, *steps, f"{gains[-1]:.1%}", f"{gaps[-1]:.2%}", f"{seconds[-1]:.1f}")
    console = Console(width=100)
    console.print(table)
    console.print(
        f"gain: mean {mean(gains):.1%}, min {min(gains):.1%}, max {max(gains):.1%}; gap: mean {mean(gaps):.2%}, "
        f"max {max(gaps):.2%}; seconds: mean {mean(seconds):.1f}, max {max(seconds):.1f}"
    )


if __name__ == "__main__":
    main()
