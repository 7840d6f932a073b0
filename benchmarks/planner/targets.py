"""Large and hard problems, each with the gap, seconds and memory that planning shall reach.

    python -m benchmarks.planner.targets FOLDER --results FILE [--only TEXT ...] [--limit 60] [--climb 600]
    python -m benchmarks.planner.targets FOLDER --list [--only TEXT ...]

FOLDER holds the workloads that `benchmarks.planner` names, and two more folders: `throughput/LayerGraphs`, graphs of
dnn-partitioning that are planned for throughput (`inceptionv3_training.json`), and `tensor-parallel`, Piper's graphs
beside BERT-32 (`gnmt.json`, `resnet.json`).
The cases:

    stored/...      the 78 cases of `benchmarks.planner.regret`: 2 % after 60 s of compute
    512 devices/... 100 to 2,000 layers on 64 hosts, alike and unlike devices: 5 %, 60 s and 4 GB without a limit
    looped/...      200 layers on 8 devices, two stages a device: 8 %, and no plan more than 1 % faster in ten minutes
                    of hill climbing without the search
    throughput/...  Inception-v3 and NASNet-A on 4, 8 and 16 devices: 5 %
    piper/...       tensor-parallel graphs: a plan in 4 GB
    random/...      problems of `benchmarks.certificates`, 100 large or 500 small ones a case: no fault

Each case runs in a process of its own and adds a line of JSON to FILE. Cases that are in FILE are not run again, so
that the command goes on where it was stopped. It ends with a table, and with code 1 if a target was missed.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe.formats.plan import Plan
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import by_kind
from bapipe.schedules import LOOPED
from benchmarks import parser_of
from benchmarks.certificates import __main__ as certificates
from benchmarks.certificates.challenger import Challenger
from benchmarks.certificates.judge import Judge
from benchmarks.planner import piper, regret, scale
from benchmarks.planner.as_profiles import dnn_partitioning, workloads
from benchmarks.planner.nasnet import LARGE_CELLS, MOBILE_CELLS, nasnet

MAX_MB = 4096
NUM_LARGE, PER_LARGE = 10_000, 100
NUM_SMALL, PER_SMALL = 5_000, 500
START_S = time.monotonic()
"""When this process was ready."""

TENSORS = ((1, 4), (8, 16), (32, 40))
"""MB of activations and of parameters of a layer."""

PIPER_DEVICES, PIPER_MICROBATCHES, PIPER_BYTES_PER_S, PIPER_MEMORY = (8, 32), 512, 25e9, 16 * 2**30


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a case.

    Attributes:
        ms: of a step, or the load.
        gap: to the lower bound.
        missed: what of the target was missed; "" if nothing.
        seconds: that the case took; a search may use several processors.
    """

    name: str
    ms: float = 0.0
    gap: float = 0.0
    seconds: float = 0.0
    megabytes: float = 0.0
    words: str = ""
    missed: str = ""


Run = Callable[[Namespace], Outcome]


def cases(folder: Path) -> Iterator[tuple[str, Run]]:
    """Yields the name of each case and what runs it."""
    for name, _, links in workloads(folder):
        for link, num_stages in product(links, (2, 4, 8)):
            case = f"stored/{name}, {link} GB/s, {num_stages} stages"
            yield case, partial(_stored, case, name, link, num_stages)
    sizes = product((100, 400, 1000, 2000), (256, 1024), TENSORS, (False, True))
    for num_layers, minibatch, (output_mb, param_mb), is_unlike in sizes:
        case = f"512 devices/{num_layers} layers, {minibatch}, {output_mb}/{param_mb} MB{', unlike' * is_unlike}"
        many = scale.Case(
            inputs=partial(scale.chain, num_layers),
            num_devices=512,
            minibatch_size=minibatch,
            per_host=8,
            is_unlike=is_unlike,
            param_bytes=param_mb * scale.MB,
            output_bytes=output_mb * scale.MB,
        )
        yield case, partial(_large, case, many, 0.05, True)
    for schedule in LOOPED:
        case = f"looped/{schedule}"
        yield case, partial(_looped, case, schedule)
    for num_devices in (4, 8, 16):
        for model, cells in (("nasnet-mobile", MOBILE_CELLS), ("nasnet-large", LARGE_CELLS)):
            case = f"throughput/{model} on {num_devices}"
            wide = scale.Case(
                inputs=partial(nasnet, cells), num_devices=num_devices, minibatch_size=32, objective="throughput"
            )
            yield case, partial(_large, case, wide, 0.05, False)
        for path in sorted((folder / "throughput").glob("*/*.json")):
            case = f"throughput/{path.stem} on {num_devices}"
            yield case, partial(_graph, case, path, num_devices)
    for path, num_devices in product(sorted((folder / "tensor-parallel").glob("*.json")), PIPER_DEVICES):
        case = f"piper/{path.stem} on {num_devices}"
        yield case, partial(_piper, case, path, num_devices)
    for first in range(0, NUM_LARGE, PER_LARGE):
        case = f"random/large {first}"
        yield case, partial(_random, case, "large", range(first, first + PER_LARGE))
    for first in range(0, NUM_SMALL, PER_SMALL):
        case = f"random/small {first}"
        yield case, partial(_random, case, "small", range(first, first + PER_SMALL))


def _stored(case: str, name: str, gigabytes: float, num_stages: int, arguments: Namespace) -> Outcome:
    profile = next(profile for known, profile, _ in workloads(arguments.folder) if known == name)
    deadline = Deadline(arguments.limit, clock=time.process_time)
    plan = regret.best_plan(profile, regret.cluster(num_stages, gigabytes), deadline)
    return _judged(case, plan, 0.02)


def _large(case: str, problem: scale.Case, max_gap: float, is_limited: bool, _: Namespace) -> Outcome:
    profile, cluster, options = scale.problem_of(problem, seed=0)
    outcome = _judged(case, bapipe.plan(profile, cluster, options), max_gap)
    if is_limited and not outcome.missed and (outcome.seconds > 60 or outcome.megabytes > MAX_MB):
        return msgspec.structs.replace(outcome, missed="60 s and 4 GB")
    return outcome


def _looped(case: str, schedule: str, arguments: Namespace) -> Outcome:
    problem = scale.Case(
        inputs=partial(scale.chain, 200), num_devices=8, minibatch_size=32, schedules=(schedule,), replicas=False
    )
    profile, cluster, options = scale.problem_of(problem, seed=0)
    outcome = _judged(case, bapipe.plan(profile, cluster, options), 0.08)
    challenger = Challenger(Judge(by_kind(profile), cluster, options), Random(0), arguments.climb)
    challenger.run()
    assert challenger.best is not None
    slower = challenger.best[0] / 1e6 / outcome.ms - 1
    missed = outcome.missed or ("1 % of hill climbing" if slower < -0.01 else "")
    return msgspec.structs.replace(outcome, words=f"{slower:+.1%} by hill climbing", missed=missed)


def _graph(case: str, path: Path, num_devices: int, arguments: Namespace) -> Outcome:
    profile = dnn_partitioning(path)
    options = PlanOptions(minibatch_size=32, microbatch_size=1, objective="throughput")
    return _judged(case, bapipe.plan(profile, regret.cluster(num_devices, 1), options), 0.05)


def _piper(case: str, path: Path, num_devices: int, arguments: Namespace) -> Outcome:
    setting = piper.Setting(
        num_devices=num_devices,
        memory=PIPER_MEMORY,
        num_microbatches=PIPER_MICROBATCHES,
        bytes_per_s=PIPER_BYTES_PER_S,
    )
    answer = piper.solve(piper.Workload(path), setting)
    if answer is None:
        return _measured(Outcome(name=case, missed="a plan"))
    return _measured(
        Outcome(
            name=case,
            ms=1e3 * answer.seconds,
            gap=answer.seconds / answer.bound - 1,
            words=f"{len(answer.stages)} stages",
            missed="" if _peak_mb() < MAX_MB else "4 GB",
        )
    )


def _random(case: str, kind: str, seeds: range, arguments: Namespace) -> Outcome:
    given = Namespace(layers=[300, 1000], devices=[2, 128], seconds=20.0, time_limit=arguments.limit)
    found = [certificates.large(seed, given) if kind == "large" else certificates.small(seed) for seed in seeds]
    faults = [f"{each.kind} {each.seed}: {each.fault}" for each in found if each.fault]
    return _measured(Outcome(name=case, words=certificates.summary(found), missed="; ".join(faults)[:200]))


def _judged(case: str, plan: Plan, max_gap: float) -> Outcome:
    gap = plan.certificate.gap
    missed = "" if gap <= max_gap else f"a gap of {max_gap:.0%}"
    words = f"{len(plan.stages)} stages"
    return _measured(Outcome(name=case, ms=plan.prediction.objective_ns / 1e6, gap=gap, words=words, missed=missed))


def _measured(outcome: Outcome) -> Outcome:
    """Returns an outcome with what this process has used so far."""
    return msgspec.structs.replace(outcome, seconds=time.monotonic() - START_S, megabytes=_peak_mb())


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def known_outcomes(path: Path) -> dict[str, Outcome]:
    """Returns the outcomes in a file by case; a last line that was cut off is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line, type=Outcome))
    return {each.name: each for each in found}


def run_apart(name: str, arguments: Namespace) -> Outcome:
    """Runs a case in a process of its own."""
    words = [str(arguments.folder), "--case", name]
    words += ["--limit", str(arguments.limit), "--climb", str(arguments.climb)]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner.targets", *words], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        return Outcome(name=name, missed=reason[:200])
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=Outcome)


def table(outcomes: list[Outcome]) -> Table:
    drawn = Table(box=SIMPLE_HEAD)
    for column in ("case", "ms", "gap", "seconds", "MB", "", "missed"):
        drawn.add_column(column, justify="left" if column in ("case", "", "missed") else "right")
    for each in outcomes:
        drawn.add_row(
            *(each.name, f"{each.ms:,.1f}", f"{each.gap:.2%}", f"{each.seconds:.1f}", f"{each.megabytes:,.0f}"),
            *(each.words, each.missed),
        )
    return drawn


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="where the workloads are")
    parser.add_argument(
        "--results", type=Path, help="file of results, one line of JSON per case; not needed for --list"
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases with one of these in their name")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--limit", type=float, default=60.0, help="compute seconds of a search that has a limit")
    parser.add_argument("--climb", type=float, default=600.0, help="compute seconds of hill climbing")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # run this one here and print its outcome
    arguments = parser.parse_args()
    runs = {name: run for name, run in cases(arguments.folder) if any(text in name for text in arguments.only)}
    if arguments.case:
        print(msgspec.json.encode(runs[arguments.case](arguments)).decode())
        return
    if arguments.list:
        print("\n".join(runs))
        return
    if arguments.results is None:
        parser.error("want --results FILE, or --list")
    known = known_outcomes(arguments.results)
    for name in (name for name in runs if name not in known):
        known[name] = outcome = run_apart(name, arguments)
        with arguments.results.open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")
        print(json.dumps(msgspec.to_builtins(outcome)), file=sys.stderr)
    shown = [known[name] for name in runs]
    Console(width=170).print(table(shown))
    sys.exit(any(each.missed for each in shown))


if __name__ == "__main__":
    main()
