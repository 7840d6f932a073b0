"""PlanOptions that several commands have, and what their texts stand for."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bapipe import report
from bapipe.cli.progress import err, note, parts_bar, planning_status, show_parts
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import read
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.settings import Settings
from bapipe.hardware import num_cores
from bapipe.planner.inputs import ASSUMED_LINK, by_kind, homogeneous_cluster, local_cluster
from bapipe.planner.options import PlanOptions
from bapipe.planner.plan import plan_cached
from bapipe.profiler.profile import profile_model_cached
from bapipe.zoo import resolve

Output = Annotated[Path, typer.Option("-o", "--output", help="File to write.", dir_okay=False)]
Devices = Annotated[
    int | None, typer.Option("--devices", min=1, max=4096, help="Number of devices, all of one kind, on this machine.")
]
Kind = Annotated[str, typer.Option("--device", help="Kind of device: cpu or cuda.")]
Arguments = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="KEY=VALUE", help="Argument of the model's factory; may be repeated."),
]
Minibatch = Annotated[int, typer.Option("--minibatch-size", min=1, help="Samples in one optimizer step.")]
Sizes = Annotated[str, typer.Option("--microbatch-size", help="Micro-batch sizes to measure, such as 1,2,4,8.")]
Sources = Annotated[
    list[str], typer.Argument(metavar="PROFILE...|MODEL", help="Profiles, one a device kind, or a model to profile.")
]
ClusterFile = Annotated[Path | None, typer.Option("--cluster", help="Cluster file; else this machine.")]
Microbatch = Annotated[int | None, typer.Option("--microbatch-size", min=1, help="Fix the micro-batch size.")]
MemoryLimit = Annotated[int | None, typer.Option("--memory-limit", min=1, help="Bytes a device may hold at most.")]
Replicas = Annotated[bool, typer.Option("--replicas/--no-replicas", help="Let stages have several devices.")]
Recompute = Annotated[bool, typer.Option("--recompute/--no-recompute", help="Let stages that do not fit recompute.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def integers(text: str) -> tuple[int, ...]:
    """Returns what a list such as 1,2,4 says."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1 or len(set(values)) < len(values):
        raise BapipeError(f"'{text}' is no list of different positive integers such as 1,2,4,8")
    return values


def key_values(pairs: list[str] | None, option: str = "--arg", such_as: str = "image_size=64") -> dict[str, object]:
    """Returns KEY=VALUE pairs; a value that is JSON is read as such, anything else is text."""
    arguments: dict[str, object] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise BapipeError(f"{option} {pair}: want KEY=VALUE, such as {such_as}")
        try:
            arguments[key] = json.loads(text)
        except json.JSONDecodeError:
            arguments[key] = text
    return arguments


def is_file(source: str) -> bool:
    """Returns whether a text names a file rather than a model."""
    return source.endswith(".json") or Path(source).is_file()


def profiles_of(sources: list[str], pairs: list[str] | None) -> dict[str, ModelProfile]:
    """Returns profiles by device kind: of files, or of a model that is measured where it was not before."""
    return by_kind(all_profiles_of(sources, pairs, num_threads=(1,)))


def all_profiles_of(
    sources: list[str], pairs: list[str] | None, num_threads: Sequence[int]
) -> tuple[ModelProfile, ...]:
    """Returns the profiles of files, or of a model that is measured with some numbers of threads.

    With several threads only the larger micro-batches are measured: smaller ones leave threads idle.
    """
    if len(sources) == 1 and not is_file(sources[0]):
        resolve(sources[0])
        found = []
        for num in num_threads:
            with parts_bar() as tell:
                settings, sizes = Settings(threads=num), (4, 8) if num > 1 else (1, 2, 4, 8)
                found.append(
                    profile_model_cached(
                        sources[0], key_values(pairs), microbatch_sizes=sizes, settings=settings, progress=tell
                    )
                )
        return tuple(found)
    if pairs:
        raise BapipeError("--arg goes with a model; a profile holds its arguments already")
    return tuple(read(Path(source), ModelProfile) for source in sources)


def threads_here() -> tuple[int, ...]:
    """Returns how many threads to measure a model with: one, and all that this machine has."""
    return tuple(sorted({1, num_cores()}))


def check_said_once(cluster: Path | None, num_devices: int | None) -> None:
    """Raises BapipeError where two options say what the devices are."""
    if cluster is not None and num_devices is not None:
        raise BapipeError("--cluster and --devices both say what the devices are; give one of them")


def cluster_of(profiles: Mapping[str, ModelProfile], cluster: Path | None, num_devices: int | None) -> Cluster:
    """Returns the devices of a cluster file, or of this machine."""
    return read(cluster, Cluster) if cluster is not None else _this_machine(profiles, num_devices)


def _this_machine(profiles: Mapping[str, ModelProfile], num_devices: int | None) -> Cluster:
    """Returns devices like the profiled one: as many as asked for, or as this machine has cores."""
    if num_devices is None:
        if set(profiles) != {"cpu"}:
            raise BapipeError("say what the devices are: --devices N like the profiled one, or --cluster FILE")
        num_devices = num_cores()
    if num_devices > 1:
        rate, latency = ASSUMED_LINK.bytes_per_s / 1e9, ASSUMED_LINK.latency_ns / 1e3
        note(f"no link was measured: assuming {rate:g} GB/s and {latency:g} us; `bapipe cluster` measures it")
    return homogeneous_cluster(profiles, num_devices)


def plan_of(source: str, pairs: list[str] | None) -> Plan:
    """Returns the plan of a file, or of a model that is profiled and planned for this machine."""
    if is_file(source):
        if pairs:
            raise BapipeError("--arg goes with a model; a plan holds its arguments already")
        return read(Path(source), Plan)
    profiles = all_profiles_of([source], pairs, threads_here())
    with err.status("measuring the link between two ranks"):
        where = local_cluster(None, profiles[0].device.kind)
    with planning_status() as progress:
        decided = plan_cached(profiles, where, PlanOptions(minibatch_size=32), progress=progress)
    show_parts(report.render_plan(decided))
    return decided
