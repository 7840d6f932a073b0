"""Plans for a model of which little is trained, on two CPU ranks: time and memory, predicted and measured.

    python -m benchmarks.lora [FOLDER] [--first 0 5] [--rounds 3] [--steps 6] [--json]

The model is Llama of six blocks with LoRA in all blocks, or in the last one only (`examples/lora.py`). bapipe's choice
for two ranks of one thread, data parallelism, and the best two stages run in turn; the first step of each run does not
count. Profiles and links that FOLDER already contains are not measured again. The measured memory is the peak of each
rank's resident memory, from when it holds nothing but its parameters.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import read, write
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.settings import Settings
from bapipe.planner.inputs import local_cluster
from bapipe.profiler.profile import profile_model

MODEL, MINIBATCH_SIZE, SIZES = "examples.lora:llama", 32, (2, 4, 8, 16)


def profile_of(first: int, path: Path) -> ModelProfile:
    """Returns the profile in a file, which is measured first if there is none."""
    if not path.exists():
        print(f"measuring the layers, adapted from block {first} on", file=sys.stderr, flush=True)
        settings = Settings(optimizer="adamw")
        write(path, profile_model(MODEL, {"first": first}, microbatch_sizes=SIZES, settings=settings, num_co_runners=1))
    return read(path, ModelProfile)


def plans(first: int, folder: Path) -> dict[str, Plan]:
    """Returns the plans to compare by the name of their configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    profile = profile_of(first, folder / f"lora-{first}.json")
    if not (folder / "cluster.json").exists():
        write(folder / "cluster.json", local_cluster(2, "cpu"))
    cluster = read(folder / "cluster.json", Cluster)
    return {
        "bapipe's choice": bapipe.plan(profile, cluster, minibatch_size=MINIBATCH_SIZE),
        "data parallel": bapipe.plan(profile, cluster, minibatch_size=MINIBATCH_SIZE, num_stages=1),
        "two stages": bapipe.plan(profile, cluster, minibatch_size=MINIBATCH_SIZE, num_stages=2, replicas=False),
    }


def compare(folder: Path, first: int, rounds: int, steps: int) -> list[dict[str, object]]:
    """Returns for each plan its step times and, by rank, its memory."""
    planned = plans(first, folder)
    step_ns: dict[str, list[int]] = {name: [] for name in planned}
    peaks: dict[str, list[int]] = {}
    for _ in range(rounds):
        for name, plan in planned.items():
            result = bapipe.run(plan, steps=steps + 1)
            step_ns[name] += result.step_ns[1:]
            own = [peak or 0 for peak in result.peak_bytes]
            peaks[name] = [max(pair) for pair in zip(own, peaks.get(name, own), strict=True)]
    return [
        {
            "first": first,
            "plan": name,
            "stages": [f"to {stage.layers[-1]} on {' and '.join(stage.devices)}" for stage in plan.stages],
            "microbatch_size": plan.microbatch_size,
            "predicted_ns": plan.prediction.step_ns,
            "measured_ns": median(step_ns[name]),
            "min_ns": min(step_ns[name]),
            "predicted_bytes": [rank.peak_bytes for rank in plan.prediction.ranks],
            "measured_bytes": peaks[name],
        }
        for name, plan in planned.items()
    ]


def table(rows: list[dict[str, object]]) -> Table:
    """Returns the comparison as a table."""
    made = Table(box=SIMPLE_HEAD)
    for column in ("adapted from", "plan", "predicted ms", "measured ms", "min ms", "predicted MB", "measured MB"):
        made.add_column(column)
    for row in rows:
        times = (row[key] for key in ("predicted_ns", "measured_ns", "min_ns"))
        sizes = (row[key] for key in ("predicted_bytes", "measured_bytes"))
        made.add_row(
            f"block {row['first']}",
            f"{row['plan']}: {', '.join(map(str, row['stages']))}; {row['microbatch_size']} each",  # type: ignore[call-overload]
            *(f"{ns / 1e6:,.0f}" for ns in times),  # type: ignore[operator]
            *(", ".join(f"{size / 1e6:.1f}" for size in ranks) for ranks in sizes),  # type: ignore[attr-defined]
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--first", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        rows = [row for first in given.first for row in compare(folder, first, given.rounds, given.steps)]
    if given.json:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(table(rows))


if __name__ == "__main__":
    main()
