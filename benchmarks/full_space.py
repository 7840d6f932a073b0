"""The whole space on PipeDream's V100 profiles: 8 devices on 2 hosts, how long the planner takes and what it says.

    python benchmarks/full_space.py [--minibatch-size 512] [--models vgg16 resnet50 gnmt8]

Two clusters: links of 10 GB/s within hosts and 10 Gb/s between them, and slow links, 10 Gb/s everywhere. Seconds are
CPU seconds of the search, the reading of the profile left out.
"""

import argparse
import time
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe.cluster import Bandwidth, Cluster, Device
from bapipe.codec import read
from bapipe.profile import ModelProfile

PROFILES = Path(__file__).parent.parent / "profiles" / "v100"
BETWEEN = Bandwidth(bytes_per_s=1_250_000_000, latency_ns=50_000)
CLUSTERS = {
    "fast within hosts": Bandwidth(bytes_per_s=10_000_000_000, latency_ns=5_000),
    "slow links": Bandwidth(bytes_per_s=1_250_000_000, latency_ns=5_000),
}


def cluster(within: Bandwidth) -> Cluster:
    """Two hosts of four V100s."""
    devices = (Device(name=f"gpu{i}", host=f"host{i // 4}", kind="cuda", memory_bytes=17_179_869_184) for i in range(8))
    return Cluster(devices=tuple(devices), intra_host=within, inter_host=BETWEEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatch-size", type=int, default=512)
    parser.add_argument("--models", nargs="+", default=["vgg16", "resnet50", "gnmt8"])
    given = parser.parse_args()
    table = Table(box=SIMPLE_HEAD)
    for column in (
        "model",
        "links",
        "CPU s",
        "step ms",
        "gap",
        "devices a stage",
        "layers a stage",
        "data parallel ms",
    ):
        table.add_column(column)
    for links, within in CLUSTERS.items():
        for name in given.models:
            profile = read(PROFILES / f"{name}.json", ModelProfile)
            start_s = time.process_time()
            plan = bapipe.plan(profile, cluster(within), minibatch_size=given.minibatch_size)
            spent_s = time.process_time() - start_s
            parallel = next(other for other in plan.alternatives if other.name == "data-parallel")
            table.add_row(
                name,
                links,
                f"{spent_s:.1f}",
                f"{plan.prediction.step_ns / 1e6:,.1f}",
                f"{plan.certificate.gap:.2%}",
                " + ".join(str(len(stage.devices)) for stage in plan.stages),
                " + ".join(str(len(stage.layers)) for stage in plan.stages),
                f"{parallel.step_ns / 1e6:,.1f}",
            )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
