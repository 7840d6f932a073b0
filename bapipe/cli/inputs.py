"""Turns arguments of the command line into profiles, clusters and plans: reads files, measures models."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import UNSET

from bapipe import report
from bapipe.cli.options import key_values
from bapipe.cli.printing import note, show_parts
from bapipe.cli.progress import parts_bar, planning_status, status
from bapipe.errors import BapipeError
from bapipe.formats.cache import load_profile_by_fingerprint
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import fingerprint, read
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile, ProfilesByKind
from bapipe.formats.settings import Settings
from bapipe.hardware import num_cores
from bapipe.planner.inputs.clusters import homogeneous_cluster, local_cluster
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import by_kind
from bapipe.planner.plan import plan_cached
from bapipe.profiler.profile import profile_model_cached
from bapipe.simulator.cuts import check_layers
from bapipe.zoo import resolve

MODEL_SIZES, MULTI_THREAD_SIZES = (1, 2, 4, 8), (4, 8)
"""Micro-batch sizes at which a model is measured; with several threads only the larger ones: small ones leave threads
idle."""


def is_file(source: str) -> bool:
    """Returns whether a text names a file, or a pipe as the shell's `<(...)` is, rather than a model."""
    return source.endswith(".json") or (Path(source).exists() and not Path(source).is_dir())


def refuse_arguments(arguments: list[str] | None, holder: str) -> None:
    """Raises BapipeError if there are arguments of a model beside a file, a `holder`, which holds its own."""
    if arguments:
        raise BapipeError(f"--arg goes with a model; a {holder} holds its arguments already")


def profiles_by_kind(sources: list[str], arguments: list[str] | None, device: str = "cpu") -> dict[str, ModelProfile]:
    """Returns profiles by device kind: read from files, or of a model, measured unless it is in the cache."""
    return by_kind(all_profiles(sources, arguments, num_threads=(1,), device=device))


def all_profiles(
    sources: list[str], arguments: list[str] | None, num_threads: Sequence[int], device: str = "cpu"
) -> tuple[ModelProfile, ...]:
    """Returns the profiles in some files, or of a model on a device: on a CPU one for each number of threads."""
    if len(sources) == 1 and not is_file(sources[0]):
        resolve(sources[0])  # an unknown name is refused before anything is measured
        num_threads = num_threads if device == "cpu" else (1,)
        return tuple(_measure_or_load(sources[0], arguments, num, device) for num in num_threads)
    refuse_arguments(arguments, "profile")
    if device != "cpu":
        raise BapipeError(f"--device {device} goes with a model; a profile says where it was measured")
    return tuple(read(Path(source), ModelProfile) for source in sources)


def _measure_or_load(model: str, arguments: list[str] | None, num_threads: int, device: str) -> ModelProfile:
    with parts_bar() as progress:
        return profile_model_cached(
            model,
            key_values(arguments),
            device=device,
            microbatch_sizes=MULTI_THREAD_SIZES if num_threads > 1 else MODEL_SIZES,
            settings=Settings(threads=num_threads),
            progress=progress,
        )


def thread_counts() -> tuple[int, ...]:
    """Returns the numbers of threads with which to measure a model: one, and all of this machine's."""
    return tuple(sorted({1, num_cores()}))


def check_one_source_of_devices(cluster: Path | None, num_devices: int | None) -> None:
    """Raises BapipeError if two options define the devices."""
    if cluster is not None and num_devices is not None:
        raise BapipeError("--cluster and --devices both define the devices; give one of them")


def read_or_assume_cluster(profiles: ProfilesByKind, cluster: Path | None, num_devices: int | None) -> Cluster:
    """Returns the cluster of a file, or of devices like the profiled one with an assumed link."""
    if cluster is None:
        return _like_profiled(profiles, num_devices)
    found = read(cluster, Cluster)
    kinds = sorted({device.kind for device in found.devices})
    for kind, profile in profiles.items():
        if kind not in kinds:
            of_groups = " (a profile of groups of these has their kind)" * (profile.device.num_members > 1)
            devices = f"the cluster's devices are of kind {', '.join(kinds)}{of_groups}"
            note(f"the profile of kind {kind} is not used: {devices}")
        models = {d.model for d in found.devices if d.kind == kind and d.model is not UNSET} - {profile.device.name}
        if models:
            note(
                f"the profile was measured on {profile.device.name}, and the cluster has {', '.join(sorted(models))}: "
                f"times hold for the former only; profile there with --kind {kind}-NAME and give "
                "those devices that kind, or give them a `speed`"
            )
    return found


def _like_profiled(profiles: ProfilesByKind, num_devices: int | None) -> Cluster:
    """Returns devices like the profiled one: `num_devices` of them, or one per core of this machine."""
    if num_devices is None:
        if set(profiles) != {"cpu"}:
            raise BapipeError("define the devices: --devices N like the profiled one, or --cluster FILE")
        num_devices = num_cores()
    cluster = homogeneous_cluster(profiles, num_devices)
    if num_devices > 1:
        rate, latency = cluster.intra_host.bytes_per_s / 1e9, cluster.intra_host.latency_ns / 1e3
        note(f"no link was measured: assuming {rate:g} GB/s and {latency:g} us; `bapipe cluster` measures it")
    return cluster


def read_or_make_plan(source: str, arguments: list[str] | None, device: str) -> Plan:
    """Returns the plan of a file, or of a model that is profiled and planned for this machine."""
    if is_file(source):
        refuse_arguments(arguments, "plan")
        if device != "cpu":
            raise BapipeError(f"--device {device} goes with a model; a plan says on which devices it runs")
        return read(Path(source), Plan)
    profiles = all_profiles([source], arguments, thread_counts(), device)
    with status("measuring the link between two ranks"):
        cluster = local_cluster(None, profiles[0].device.kind)
    with planning_status() as progress:
        plan = plan_cached(profiles, cluster, PlanOptions(minibatch_size=32), progress=progress)
    show_parts(report.render_plan(plan))
    return plan


def read_profiles(paths: Sequence[Path] | None) -> list[ModelProfile]:
    """Returns the profiles in some files."""
    return [read(path, ModelProfile) for path in paths or ()]


def profiles_of_plan(
    plan: Plan, given: Sequence[ModelProfile], named: str = "with --profile"
) -> dict[str, ModelProfile]:
    """Returns profiles by kind: those given, and for the other kinds the profiles that the plan was made from.

    Args:
        named: how a command is given their files.

    Raises:
        BapipeError: a kind of which none is given, and the cache does not hold the plan's; or a profile that is given
            is of another kind than the plan's devices, or of other layers.
    """
    found = by_kind(given) if given else {}
    kinds = {device.kind for device in plan.cluster.devices}
    for kind, profile in found.items():
        if kind not in kinds:
            raise BapipeError(
                f"the profile of {profile.model} is of kind '{kind}', and the plan's devices are of kind "
                f"{', '.join(sorted(kinds))}: leave its --profile out"
            )
        check_layers(plan.stages, profile)
    note_other_profiles(plan, found)
    for kind in sorted(kinds - set(found)):
        cached = load_profile_by_fingerprint(plan.profiles[kind]) if kind in plan.profiles else None
        if cached is None:
            raise BapipeError(
                f"the profile of kind '{kind}' that the plan was made from is not in the cache of this machine: name "
                f"its file {named}"
            )
        found[kind] = cached
    return found


def note_other_profiles(plan: Plan, profiles: ProfilesByKind) -> None:
    """Notes which profiles are not those that a plan was made from: its figures in its file are of these."""
    for kind, profile in profiles.items():
        if plan.profiles.get(kind) not in (None, fingerprint(profile)):
            note(f"the plan was made from another {kind} profile of {plan.model}")
