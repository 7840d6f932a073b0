"""VGG-16 on two hosts: the plan for each link, its predicted and measured step, and its speedup over data parallelism.

    python -m benchmarks.two_hosts FOLDER [--links 1gbit 100mbit] [--width 24] [--minibatch-size 32] [--steps 8]

Two network namespaces of this machine are the hosts; `tc` limits the link between them. The cluster is what `bapipe
cluster --probe` measures under torchrun in both. Data parallelism is run by bapipe and by torch's
DistributedDataParallel. Profile, clusters and step times in FOLDER are not measured again. Without root it only says
why it does nothing. The hosts share the machine's memory bandwidth, so layers are profiled with one co-runner. A new
connection takes a dozen steps to reach the rate of a slow link, so the plan runs five times as many as the others.
"""

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe.formats.codec import write
from bapipe.profiler.options import ProfileOptions
from bapipe.profiler.profile import profile_model
from bapipe.schedules import SCHEDULES
from bapipe.schedules.placement import distribute_replicas
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import build_stages
from bapipe.training.train_result import WARM_UP_STEPS
from benchmarks import parser_of
from benchmarks.two_hosts.namespaces import TwoHosts, two_hosts, why_not

BURST = {"1gbit": "128kb", "100mbit": "32kb"}
"""Bytes that may pass at once, one or two milliseconds at the rate: with more, small messages would not be limited."""

CLI = ["-c", "from bapipe.cli import main; main()"]


@dataclass(frozen=True)
class Configuration:
    """A configuration: the plan with its predicted step, and the measured steps after the warm-up."""

    name: str
    plan: bapipe.Plan
    step_ns: list[int]

    @property
    def predicted_ns(self) -> int:
        return self.plan.prediction.step_ns

    @property
    def measured_ns(self) -> float:
        return median(self.step_ns)


def data_parallel(plan: bapipe.Plan, profile: bapipe.ModelProfile) -> bapipe.Plan:
    """The plan with all layers on both devices, at its best micro-batch size, simulated."""
    names = tuple(layer.name for layer in profile.layers)
    devices = tuple(device.name for device in plan.cluster.devices)
    stages = (bapipe.StagePlan(layers=names, devices=devices),)
    candidates = []
    for size in profile.microbatch_sizes:
        num = plan.minibatch_size // size
        if num * size != plan.minibatch_size or num < len(devices):
            continue
        table = distribute_replicas(SCHEDULES["1f1b"](1, num), ((0, 1),), 2)
        timeline = simulate_schedule(table, build_stages(stages, {"cpu": profile}, plan.cluster, size), plan.cluster)
        candidates.append(
            msgspec.structs.replace(
                plan,
                schedule="1f1b",
                stages=stages,
                microbatch_size=size,
                num_microbatches=num,
                order=tuple(tuple(map(str, actions)) for actions in table.order),
                prediction=timeline.prediction(plan.minibatch_size),
            )
        )
    return min(candidates, key=lambda plan: plan.prediction.step_ns)


def probe_cluster(hosts: TwoHosts, path: Path) -> bapipe.Cluster:
    """The two hosts as a probe on them measures them."""
    if not path.exists():
        hosts.torchrun([sys.executable, *CLI, "cluster", "--probe", "-o", str(path)], timeout_s=300)
    return bapipe.read(path, bapipe.Cluster)


def run_by_bapipe(hosts: TwoHosts, plan: bapipe.Plan, path: Path, steps: int) -> list[int]:
    """Step times of a plan as the command line runs it on both hosts."""
    write(path, plan)
    output = hosts.run([*CLI, "run", str(path), "--steps", str(steps), "--json"], timeout_s=300)
    times: list[int] = json.loads(output)["step_ns"]
    return times


def run_by_torch(hosts: TwoHosts, plan: bapipe.Plan, path: Path, steps: int) -> list[int]:
    """Step times of DistributedDataParallel on a plan's model and batches."""
    write(path, plan)
    times: list[int] = json.loads(hosts.run(["-m", "benchmarks.two_hosts.ddp", str(path), str(steps)], timeout_s=300))
    return times


def measure_configurations(
    hosts: TwoHosts, rate: str, profile: bapipe.ModelProfile, args: argparse.Namespace
) -> list[Configuration]:
    """The best plan for a link, and data parallelism run by bapipe and by DDP, each measured."""
    hosts.limit(rate, BURST[rate])
    cluster = probe_cluster(hosts, args.folder / f"cluster-{rate}.json")
    best = bapipe.plan(profile, cluster, minibatch_size=args.minibatch_size)
    parallel = data_parallel(best, profile)
    cut = f"cut after {best.stages[0].layers[-1]}" if len(best.stages) > 1 else "one stage"
    configurations: list[Configuration] = []
    for name, plan, run, steps in (
        (f"{best.schedule}, {cut}", best, run_by_bapipe, 5 * args.steps),
        ("all replicas", parallel, run_by_bapipe, args.steps),
        ("torch's DDP", parallel, run_by_torch, args.steps),
    ):
        times_path = args.folder / f"{rate}-{len(configurations)}.steps.json"
        if not times_path.exists():
            times = run(hosts, plan, args.folder / f"{rate}-{len(configurations)}.plan.json", steps)
            times_path.write_text(json.dumps(times))
        configurations.append(Configuration(name, plan, json.loads(times_path.read_text())[WARM_UP_STEPS:]))
    return configurations


def row(config: Configuration, best: Configuration) -> list[str]:
    """One line of the table; ratios are to the best plan."""
    ratio = config.measured_ns / best.measured_ns
    predicted_ratio = config.predicted_ns / best.predicted_ns
    ratios = [f"{predicted_ratio:.2f}", f"{ratio:.2f}", f"{predicted_ratio / ratio - 1:+.1%}"]
    return [
        config.name,
        f"{config.plan.num_microbatches} x {config.plan.microbatch_size}",
        f"{config.predicted_ns / 1e6:,.0f}",
        f"{config.measured_ns / 1e6:,.0f} ({min(config.step_ns) / 1e6:,.0f} to {max(config.step_ns) / 1e6:,.0f})",
        f"{config.predicted_ns / config.measured_ns - 1:+.1%}",
        *(ratios if config is not best else []),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--links", nargs="+", choices=list(BURST), default=list(BURST))
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--minibatch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(f"skipped: {reason}")
    console = Console(width=125)
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / "profile.json"
    if not path.exists():
        sizes = [2**e for e in range(1, 10) if 2**e <= args.minibatch_size]
        write(
            path,
            profile_model("vgg16", {"width": args.width}, ProfileOptions(microbatch_sizes=sizes), num_co_runners=1),
        )
    profile = bapipe.read(path, bapipe.ModelProfile)
    with two_hosts() as hosts:
        for rate in args.links:
            configurations = measure_configurations(hosts, rate, profile, args)
            link = configurations[0].plan.cluster.link(0, 1)
            title = f"{rate}: probed {link.bytes_per_s / 1e6:.1f} MB/s, {link.latency_ns / 1e3:.0f} us"
            table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
            for column in ("configuration", "micro-batches"):
                table.add_column(column)
            for column in ("predicted ms", "measured ms", "error", "predicted ratio", "measured", "error"):
                table.add_column(column, justify="right")
            for config in configurations:
                table.add_row(*row(config, configurations[0]))
            console.print(table)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that no namespace is left behind
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
