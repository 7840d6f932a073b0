"""Every named schedule and a searched order on two CPU ranks: does the simulator rank them as measurements do?

    python benchmarks/schedules_two_ranks.py FOLDER [--minibatch-size 32] [--microbatch-size 8] [--minutes 4]

VGG-16 on 64x64 images, one thread per rank. Each schedule runs with its best cut. The folder keeps the profile, the
link and the measurements: each call adds measurements for its minutes, first of the schedules with the fewest runs,
and prints the results of all calls. Figures are medians over a schedule's runs of each run's typical step.
Kendall's tau is 1 if both orders agree, -1 if they are opposite.
"""

import json
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import read, write
from bapipe.formats.profile import ModelProfile
from bapipe.planner.inputs.clusters import local_cluster
from bapipe.planner.inputs.options import SEARCH
from bapipe.profiler.options import ProfileOptions
from bapipe.profiler.profile import profile_model
from bapipe.schedules import ALL, LOOPED, SIDE_BY_SIDE
from benchmarks import parser_of


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Rank correlation of (predicted, measured) pairs."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(signs)


def inputs(folder: Path, microbatch_size: int) -> tuple[ModelProfile, Cluster]:
    """Returns the profile and the cluster of the folder, measured by the first call."""
    if not (folder / "cluster.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "profile.json", profile_model("vgg16", {}, ProfileOptions(microbatch_sizes=[microbatch_size])))
        write(folder / "cluster.json", local_cluster(2, "cpu"))
    return read(folder / "profile.json", ModelProfile), read(folder / "cluster.json", Cluster)


def report(plans: dict[str, bapipe.Plan], measured: dict[str, list[int]]) -> None:
    table = Table(box=SIMPLE_HEAD)
    for column in ("schedule", "runs", "predicted ms", "measured ms", "min", "max", "error"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    pairs = []
    for name, times in sorted(measured.items(), key=lambda item: median(item[1])):
        predicted = plans[name].prediction.step_ns
        pairs.append((predicted, median(times)))
        figures = (predicted, median(times), min(times), max(times))
        error = f"{predicted / median(times) - 1:+.1%}"
        table.add_row(name, str(len(times)), *(f"{ns / 1e6:,.0f}" for ns in figures), error)
    console = Console(width=100)
    console.print(table)
    if len(pairs) > 1:
        console.print(f"{len(pairs)} of {len(plans)} schedules, Kendall's tau {kendall_tau(pairs):.2f}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minibatch-size", type=int, default=32)
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes

    profile, cluster = inputs(given.folder, given.microbatch_size)
    plans = {
        name: bapipe.plan(
            profile,
            cluster,
            minibatch_size=given.minibatch_size,
            schedules=[name],
            num_stages=4 if name in LOOPED else 2,
        )
        for name in [*(name for name in ALL if name not in SIDE_BY_SIDE), SEARCH]
    }
    kept = given.folder / "measured.json"
    measured: dict[str, list[int]] = json.loads(kept.read_text()) if kept.exists() else {}
    while time.monotonic() < until:
        name = min(plans, key=lambda name: len(measured.get(name, [])))
        step_ns = bapipe.run(plans[name], data="mnist", steps=given.steps).typical_step_ns
        measured.setdefault(name, []).append(step_ns)
        kept.write_text(json.dumps(measured))
    report(plans, measured)


if __name__ == "__main__":
    main()
