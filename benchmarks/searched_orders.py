"""Searched orders against the best named schedule at equal memory: gain, gap to the bound, and seconds.

    python benchmarks/searched_orders.py [--ranks 8] [--microbatches 16] [--instances 10] [--effort 40]

Random pipelines of one stage a rank: F, I and W of each stage lie within the spread around 10 ms, transfers take 1 to
5 % of an action (links between hosts lie there for activations of a few MB), and every rank may hold min(p, m) + 2
stashes. What is simulated here is the judge's; no process runs.
"""

import argparse
import time
from random import Random
from statistics import mean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bapipe.cluster import Bandwidth, Cluster, Device
from bapipe.cost import Stage, StageCost
from bapipe.schedules import SCHEDULES
from bapipe.search.order import search_order
from bapipe.simulate import judge

MS = 10**6


def pipeline(random: Random, num_ranks: int, spread: float, memory_bytes: int) -> tuple[list[Stage], Cluster]:
    """Stages of 100 bytes a stash, and ranks in a row."""

    def around() -> int:
        return round(10 * MS * random.uniform(1 - spread, 1 + spread))

    stages = [
        Stage(
            on=(StageCost(forward_ns=around(), input_grad_ns=around(), weight_grad_ns=around(), stash_bytes=100),),
            send_bytes=1,
            grad_bytes=1,
        )
        for _ in range(num_ranks)
    ]
    link = Bandwidth(bytes_per_s=10**12, latency_ns=round(MS * random.uniform(0.1, 0.5)))
    devices = tuple(Device(name=f"d{i}", host="h", kind="a", memory_bytes=memory_bytes) for i in range(num_ranks))
    return stages, Cluster(devices=devices, intra_host=link, inter_host=link)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--instances", type=int, default=10)
    parser.add_argument("--effort", type=float, default=40.0)
    parser.add_argument("--spread", type=float, default=0.3)
    given = parser.parse_args()
    p, m = given.ranks, given.microbatches
    limit = 100 * (min(p, m) + 2) + 2 * m  # stashes, and receive buffers of a byte a micro-batch on either side

    table = Table(box=SIMPLE_HEAD)
    for column in ("instance", "best named", "its step ms", "searched ms", "gain", "gap to the bound", "seconds"):
        table.add_column(column, justify="left" if column == "best named" else "right")
    gains, gaps, seconds = [], [], []
    for instance in range(given.instances):
        stages, cluster = pipeline(Random(instance), p, given.spread, limit)
        named = {}
        for name, build in SCHEDULES.items():
            timeline = judge(build(p, m), stages, cluster)
            if max(memory.total for memory in timeline.memory) <= limit:
                named[name] = timeline.step_ns
        best = min(named, key=named.__getitem__)
        start = time.perf_counter()
        found = search_order(
            stages,
            tuple((rank,) for rank in range(p)),
            cluster,
            num_microbatches=m,
            memory_bytes=[limit] * p,
            start=[SCHEDULES[name](p, m) for name in named],
            effort=given.effort,
        )
        seconds.append(time.perf_counter() - start)
        assert found.step_ns is not None
        assert found.lower_bound_ns is not None
        gains.append(named[best] / found.step_ns - 1)
        gaps.append(found.step_ns / found.lower_bound_ns - 1)
        steps = (f"{ns / MS:,.1f}" for ns in (named[best], found.step_ns))
        table.add_row(str(instance), best, *steps, f"{gains[-1]:.1%}", f"{gaps[-1]:.2%}", f"{seconds[-1]:.1f}")
    console = Console(width=100)
    console.print(table)
    console.print(
        f"gain: mean {mean(gains):.1%}, least {min(gains):.1%}, most {max(gains):.1%}; gap: mean {mean(gaps):.2%}, "
        f"most {max(gaps):.2%}; seconds: mean {mean(seconds):.1f}, most {max(seconds):.1f}"
    )


if __name__ == "__main__":
    main()
