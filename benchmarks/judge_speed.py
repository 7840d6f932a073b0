"""How many actions a second the judge times, on every kind of table and link.

    python benchmarks/judge_speed.py [--ranks 8] [--microbatches 64] [--seconds 1.0]

`times` is what a search asks: when each rank is done, for a table that was compiled before. `timeline` is the whole
answer of `judge`, with every action, transfer and byte, for a table it has seen before; `new table` compiles it too.
Stages are uneven, and transfers take 5 to 15 % of an action. The best of as many runs as the seconds allow.
"""

import argparse
import time
from collections.abc import Callable
from random import Random

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.planner.schedule_placement import distribute_replicas
from bapipe.schedules import ALL
from bapipe.schedules.table import Schedule
from bapipe.simulator.compiled import compile_schedule
from bapipe.simulator.simulate import compile_for_cluster, finish_ns, simulate_schedule
from bapipe.simulator.stage_cost import Stage, StageCost

MS = 10**6


def cluster(num_ranks: int, *, overlaps: bool) -> Cluster:
    """Returns ranks whose links take a millisecond and a nanosecond a byte."""
    link = Bandwidth(bytes_per_s=10**9, latency_ns=MS)
    devices = tuple(
        Device(name=f"d{i}", host="h", kind="a", memory_bytes=0, overlaps_transfers=overlaps) for i in range(num_ranks)
    )
    return Cluster(devices=devices, intra_host=link, inter_host=link)


def uneven(schedule: Schedule) -> list[Stage]:
    """Returns stages within 30 % of 10 ms a phase, the same on all devices of a stage."""
    random = Random(0)
    stages = []
    for s, devices in enumerate(schedule.devices):
        f, i, w = (round(10 * MS * random.uniform(0.7, 1.3)) for _ in range(3))
        cost = StageCost(forward_ns=f, input_grad_ns=i, weight_grad_ns=w, stash_bytes=100, workspace_bytes=10)
        num_bytes = random.randrange(MS // 2) if s + 1 < schedule.num_stages else 0
        stages.append(Stage(costs=(cost,) * len(devices), send_bytes=num_bytes, grad_bytes=num_bytes))
    return stages


def best_s(call: Callable[[], object], seconds: float) -> float:
    """Returns the shortest run of a call."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(table: Schedule, stages: list[Stage], where: Cluster, seconds: float) -> tuple[float, float, float]:
    """Returns the seconds of the times alone, of the timeline, and of the timeline of a new table."""
    program = compile_for_cluster(table, where)

    def anew() -> None:
        compile_schedule.cache_clear()
        simulate_schedule(table, stages, where)

    return (
        best_s(lambda: finish_ns(program, stages, where), seconds),
        best_s(lambda: simulate_schedule(table, stages, where), seconds),
        best_s(anew, seconds),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="spent on each figure")
    given = parser.parse_args()
    p, m = given.ranks, given.microbatches

    tables = {name: ALL[name](p, m) for name in ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v")}
    pairs = tuple((rank, rank + 1) for rank in range(0, p, 2))
    tables["1f1b, 2 devices a stage"] = distribute_replicas(ALL["1f1b"](p // 2, m), pairs, p)
    cases = [
        *((name, tables[name], True) for name in tables),
        *((f"{name}, no overlap", tables[name], False) for name in tables),
    ]
    shown = RichTable(title="thousands of actions a second", title_justify="left", box=SIMPLE_HEAD)
    for column in ("table", "actions", "times", "timeline", "new table"):
        shown.add_column(column, justify="left" if column == "table" else "right")
    for name, table, overlaps in cases:
        num = sum(map(len, table.order))
        seconds = measure(table, uneven(table), cluster(p, overlaps=overlaps), given.seconds)
        shown.add_row(name, f"{num:,}", *(f"{num / s / 1e3:,.0f}" for s in seconds))
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
