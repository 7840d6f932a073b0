"""The whole space on PipeDream's V100 profiles: 8 devices on 2 hosts, how long the planner takes, and its plans.

    python benchmarks/full_space.py [--models vgg16 resnet50 gnmt8] [--minibatch-sizes 128 256 512 1024] [--links ...]

Links within hosts and between them: `equal`, 10 Gb/s and 50 us everywhere; `slow`, the same with 5 us within hosts;
`fast`, 10 GB/s within hosts and 10 Gb/s between them; `thin`, 10 Gb/s within hosts and 100 Mb/s between them. Seconds
are CPU seconds of the search, without reading the profile.
"""

import time
from itertools import product
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.codec import read
from bapipe.formats.profile import ModelProfile
from benchmarks import parser_of

PROFILES = Path(__file__).parent.parent / "profiles" / "v100"
EQUAL = Bandwidth(bytes_per_s=1_250_000_000, latency_ns=50_000)
SLOW = Bandwidth(bytes_per_s=1_250_000_000, latency_ns=5_000)
LINKS = {
    "equal": (EQUAL, EQUAL),
    "slow": (SLOW, EQUAL),
    "fast": (Bandwidth(bytes_per_s=10_000_000_000, latency_ns=5_000), EQUAL),
    "thin": (SLOW, Bandwidth(bytes_per_s=12_500_000, latency_ns=50_000)),
}
"""Within hosts, and between them."""

COLUMNS = "model, links, mini-batch, CPU s, step ms, gap, schedule, devices a stage, layers a stage, data parallel ms"


def cluster(within: Bandwidth, between: Bandwidth) -> Cluster:
    """Two hosts of four V100s."""
    devices = (Device(name=f"gpu{i}", host=f"host{i // 4}", kind="cuda", memory_bytes=17_179_869_184) for i in range(8))
    return Cluster(devices=tuple(devices), intra_host=within, inter_host=between)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minibatch-sizes", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--models", nargs="+", default=["vgg16", "resnet50", "gnmt8"])
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    given = parser.parse_args()
    table = Table(*COLUMNS.split(", "), box=SIMPLE_HEAD)
    for name, links, size in product(given.models, given.links, given.minibatch_sizes):
        profile = read(PROFILES / f"{name}.json", ModelProfile)
        start_s = time.process_time()
        plan = bapipe.plan(profile, cluster(*LINKS[links]), minibatch_size=size)
        spent_s = time.process_time() - start_s
        parallel = next((other for other in plan.alternatives if other.name == "data-parallel"), None)
        table.add_row(
            name,
            links,
            str(size),
            f"{spent_s:.1f}",
            f"{plan.prediction.step_ns / 1e6:,.1f}",
            f"{plan.certificate.gap:.2%}",
            plan.schedule,
            " + ".join(str(len(stage.devices)) for stage in plan.stages),
            " + ".join(str(len(stage.layers)) for stage in plan.stages),
            "" if parallel is None else f"{parallel.step_ns / 1e6:,.1f}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
