"""How many actions per second the simulator times, for every kind of schedule and link.

    python benchmarks/simulator_speed.py [--ranks 8] [--microbatches 64] [--seconds 1.0]

`finish times` is what a search asks: when each rank finishes, for a compiled schedule. `timeline` is the complete
result of `simulate_schedule`, with every action, transfer and byte, for a compiled schedule; `new schedule` also
compiles it. Stages are uneven, and transfers take 5 to 15 % of an action. The figure is the best of the runs that the
seconds allow.
"""

import time
from collections.abc import Callable
from random import Random

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.schedules import ALL
from bapipe.schedules.placement import distribute_replicas
from bapipe.schedules.table import Schedule
from bapipe.simulator.compiled import compile_schedule
from bapipe.simulator.simulate import compile_for_cluster, finish_ns, simulate_schedule
from bapipe.simulator.stage import Stage, StageCost
from benchmarks import parser_of

MS = 10**6


def equal_devices(num_ranks: int, *, overlaps: bool) -> Cluster:
    """Returns devices whose links take a millisecond plus a nanosecond per byte."""
    link = Bandwidth(bytes_per_s=10**9, latency_ns=MS)
    devices = tuple(
        Device(name=f"d{i}", host="h", kind="a", memory_bytes=0, overlaps_transfers=overlaps) for i in range(num_ranks)
    )
    return Cluster(devices=devices, intra_host=link, inter_host=link)


def uneven_stages(schedule: Schedule) -> list[Stage]:
    """Returns stages whose phases take 10 ms within 30 %, the same on all devices of a stage."""
    random = Random(0)
    stages = []
    for s, devices in enumerate(schedule.devices):
        f, i, w = (round(10 * MS * random.uniform(0.7, 1.3)) for _ in range(3))
        cost = StageCost(forward_ns=f, input_grad_ns=i, weight_grad_ns=w, stash_bytes=100, workspace_bytes=10)
        num_bytes = random.randrange(MS // 2) if s + 1 < schedule.num_stages else 0
        stages.append(Stage(costs=(cost,) * len(devices), send_bytes=num_bytes, grad_bytes=num_bytes))
    return stages


def best_s(call: Callable[[], object], seconds: float) -> float:
    """Returns the seconds of the fastest run of a call."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(schedule: Schedule, stages: list[Stage], cluster: Cluster, seconds: float) -> tuple[float, float, float]:
    """Returns the seconds of the finish times, of the timeline, and of the timeline of a new schedule."""
    compiled = compile_for_cluster(schedule, cluster)

    def compile_and_simulate() -> None:
        compile_schedule.cache_clear()
        simulate_schedule(schedule, stages, cluster)

    return (
        best_s(lambda: finish_ns(compiled, stages, cluster), seconds),
        best_s(lambda: simulate_schedule(schedule, stages, cluster), seconds),
        best_s(compile_and_simulate, seconds),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds spent on each figure")
    arguments = parser.parse_args()
    p, m = arguments.ranks, arguments.microbatches

    schedules = {name: ALL[name](p, m) for name in ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v")}
    pairs = tuple((rank, rank + 1) for rank in range(0, p, 2))
    schedules["1f1b, 2 devices per stage"] = distribute_replicas(ALL["1f1b"](p // 2, m), pairs, p)
    cases = [
        *((name, schedules[name], True) for name in schedules),
        *((f"{name}, no overlap", schedules[name], False) for name in schedules),
    ]
    table = Table(title="thousands of actions per second", title_justify="left", box=SIMPLE_HEAD)
    for column in ("schedule", "actions", "finish times", "timeline", "new schedule"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for name, schedule, overlaps in cases:
        num = sum(map(len, schedule.order))
        times_s = measure(schedule, uneven_stages(schedule), equal_devices(p, overlaps=overlaps), arguments.seconds)
        table.add_row(name, f"{num:,}", *(f"{num / s / 1e3:,.0f}" for s in times_s))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
