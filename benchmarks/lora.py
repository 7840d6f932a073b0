"""Plans for a model of which little is trained, on two CPU ranks: time and memory, predicted and measured.

    python -m benchmarks.lora [FOLDER] [--first 0 5] [--steps 20] [--json]

The model is Llama of six blocks with LoRA in all blocks, or in the last one only (`examples/lora.py`). Two plans for
two ranks of one thread, data parallelism and the best two stages, train in the same two processes and take turns after
every step, so that other work on the machine slows both alike. The ratio is the median of those of neighbouring steps,
with the 95 % confidence interval of a median; the first two steps of each plan do not count. Profiles and links that
FOLDER already contains are not measured again. The measured memory is what the allocator has given out at the peak of a
step, with parameters, gradients, optimizer state and receive buffers.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import read, write
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.settings import Settings
from bapipe.planner.inputs.clusters import local_cluster
from bapipe.profiler.options import ProfileOptions
from bapipe.profiler.profile import profile_model
from bapipe.runtime.optimizer import optimizer_factory
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.sizes import repeat_to_batch
from bapipe.training.launch.processes import launch
from bapipe.training.launch.worker import Rank
from bapipe.zoo.factory import build
from benchmarks import parser_of
from benchmarks.fidelity import allocated

MODEL, MINIBATCH_SIZE, SIZES = "examples.lora:llama", 32, (2, 4, 8, 16)
NOT_COUNTED = 2


def profile_of(first: int, path: Path) -> ModelProfile:
    """Returns the profile in a file, which is measured first if there is none."""
    if not path.exists():
        print(f"measuring the layers, adapted from block {first} on", file=sys.stderr, flush=True)
        settings = Settings(optimizer="adamw")
        write(
            path,
            profile_model(
                MODEL, {"first": first}, ProfileOptions(microbatch_sizes=SIZES, settings=settings), num_co_runners=1
            ),
        )
    return read(path, ModelProfile)


def plans(first: int, folder: Path) -> tuple[dict[str, Plan], str]:
    """Returns the plans to compare by name, and the name of the one that bapipe chooses."""
    folder.mkdir(parents=True, exist_ok=True)
    profile = profile_of(first, folder / f"lora-{first}.json")
    if not (folder / "cluster.json").exists():
        write(folder / "cluster.json", local_cluster(2, "cpu"))
    cluster = read(folder / "cluster.json", Cluster)
    choice = bapipe.plan(profile, cluster, minibatch_size=MINIBATCH_SIZE)
    compared = {
        "data parallel": bapipe.plan(profile, cluster, minibatch_size=MINIBATCH_SIZE, num_stages=1),
        "two stages": bapipe.plan(profile, cluster, minibatch_size=MINIBATCH_SIZE, num_stages=2, replicas=False),
    }
    chosen = next((name for name, plan in compared.items() if plan.stages == choice.stages), "another plan")
    return compared if chosen in compared else compared | {chosen: choice}, chosen


def train(rank: Rank, compared: Sequence[Plan], steps: int) -> tuple[list[list[int]], list[int]]:
    """Returns the times of each plan's steps in nanoseconds, and the bytes at this rank's peak, of each plan."""
    pipelines, batches = [], []
    for plan in compared:
        assert plan.factory is not None
        example = build(plan.factory, plan.arguments)
        device, (num, target) = torch.device("cpu"), (plan.minibatch_size, example.target)
        batches.append([repeat_to_batch(tensor, num, device) for tensor in (*example.tensors, target)])
        pipelines.append(
            Pipeline(
                example.module,
                plan,
                loss=example.loss,
                inputs=example.inputs,
                optimizer=optimizer_factory("adamw", 1e-4, {}),
                check=False,
            )
        )
    step_ns: list[list[int]] = [[] for _ in compared]
    for step in range(steps + NOT_COUNTED):
        rank.enter_step(step)
        for pipeline, batch, times in zip(pipelines, batches, step_ns, strict=True):
            dist.barrier()
            start = time.perf_counter_ns()
            pipeline.step(*batch[:-1], target=batch[-1])
            dist.barrier()
            times.append(time.perf_counter_ns() - start)
    return [times[NOT_COUNTED:] for times in step_ns], [
        _peak_bytes(pipeline, batch, plan) for pipeline, batch, plan in zip(pipelines, batches, compared, strict=True)
    ]


def _peak_bytes(pipeline: Pipeline, batch: Sequence[torch.Tensor], plan: Plan) -> int:
    held = list(pipeline.named_parameters().values())
    state = [*held, *(p.grad for p in held if p.grad is not None), *pipeline.optimizer_state()["tensors"].values()]
    before = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in state}.values())
    _, more = allocated(lambda: pipeline.step(*batch[:-1], target=batch[-1]), torch.device("cpu"))
    return before + more + plan.prediction.ranks[pipeline.rank].memory.buffers


def compare(folder: Path, first: int, steps: int) -> list[dict[str, Any]]:
    """Returns for each plan its step times and, by rank, its memory; ratios are to the plan that bapipe chooses."""
    compared, chosen = plans(first, folder)
    results = launch(train, ["cpu0", "cpu1"], list(compared.values()), steps)
    step_ns = results[0][0]
    chosen_ns = step_ns[list(compared).index(chosen)]
    rows = []
    for index, (name, plan) in enumerate(compared.items()):
        ratios = sorted(own / reference for own, reference in zip(step_ns[index], chosen_ns, strict=True))
        low, high = interval_of_median(len(ratios))
        rows.append(
            {
                "first": first,
                "plan": name,
                "chosen": name == chosen,
                "stages": [f"to {stage.layers[-1]} on {' and '.join(stage.devices)}" for stage in plan.stages],
                "microbatch_size": plan.microbatch_size,
                "predicted_ns": plan.prediction.step_ns,
                "measured_ns": median(step_ns[index]),
                "predicted_ratio": plan.prediction.step_ns / compared[chosen].prediction.step_ns,
                "ratio": median(ratios),
                "ratio_from": ratios[low],
                "ratio_to": ratios[high],
                "predicted_bytes": [rank.peak_bytes for rank in plan.prediction.ranks],
                "measured_bytes": [peaks[index] for _, peaks in results],
            }
        )
    return rows


def interval_of_median(count: int) -> tuple[int, int]:
    """Returns which of a number of sorted values enclose their distribution's median with 95 % confidence."""
    away = 0.98 * sqrt(count)  # 1.96 standard deviations of a binomial distribution of chance 1/2
    return max(0, int((count - 1) / 2 - away)), min(count - 1, int((count - 1) / 2 + away + 0.999))


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns the comparison as a table."""
    made = Table(box=SIMPLE_HEAD)
    for column in ("adapted from", "plan", "predicted ms", "measured ms", "predicted ratio", "measured ratio",
                   "predicted MB", "measured MB"):  # fmt: skip
        made.add_column(column)
    for row in rows:
        sizes = (row[key] for key in ("predicted_bytes", "measured_bytes"))
        made.add_row(
            f"block {row['first']}",
            f"{row['plan']}{' (chosen)' if row['chosen'] else ''}: {', '.join(row['stages'])}; "
            f"{row['microbatch_size']} each",
            *(f"{row[key] / 1e6:,.0f}" for key in ("predicted_ns", "measured_ns")),
            f"{row['predicted_ratio']:.2f}",
            f"{row['ratio']:.2f} ({row['ratio_from']:.2f} to {row['ratio_to']:.2f})",
            *(", ".join(f"{size / 1e6:.1f}" for size in ranks) for ranks in sizes),
        )
    return made


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--first", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        rows = [row for first in given.first for row in compare(folder, first, given.steps)]
    if given.json:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(table(rows))


if __name__ == "__main__":
    main()
