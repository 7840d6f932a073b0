"""Planning and training again for the remaining devices if some are lost."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import msgspec

from bapipe.device_types import type_of_kind
from bapipe.errors import BapipeError, Infeasible, RunFailed
from bapipe.formats.cache import load_profile_by_fingerprint
from bapipe.formats.certificate import Certificate, MemoryLimit
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile, ProfilesByKind
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.sub_clusters import with_devices
from bapipe.planner.plan import plan_once
from bapipe.schedules import ALL, SIDE_BY_SIDE
from bapipe.torchrun import current_job
from bapipe.training.train_result import TrainResult


def run_with_replanning(
    plan: Plan,
    profiles: ProfilesByKind,
    train_plan: Callable[[Plan, bool], TrainResult],
    *,
    without: Collection[str],
    resume: bool,
    on_replan: Callable[[str, Plan], None],
) -> TrainResult:
    """Trains a plan, and a new one for the remaining devices whenever some are lost, before or during training.

    Args:
        profiles: see `profiles_for_replanning`.
        train_plan: gets a plan, and whether to resume from a checkpoint.
        without: names of devices that are lost already.
        on_replan: gets the reason and the new plan.

    Raises:
        RunFailed: a rank failed without losing its device, or no device remains.
    """
    profiles = profiles_for_replanning(plan, profiles)
    lost, current = lost_devices(plan, without, num_available_devices(plan)), plan
    if not set(lost).isdisjoint(plan.used_devices):
        job = current_job()
        current = replan(plan, lost, profiles, None if job is None else job.size)
        on_replan(f"without {', '.join(lost)}", current)
    while True:
        try:
            return train_plan(current, resume)
        except RunFailed as error:
            lost = (*lost, *error.lost)
            if not error.lost or len(lost) == len(plan.cluster.devices):
                raise
            resume, current = True, replan(plan, lost, profiles, None)
            on_replan(str(error), current)


def profiles_for_replanning(plan: Plan, profiles: ProfilesByKind) -> dict[str, ModelProfile]:
    """Returns a profile per device kind: of `profiles`, or else the cached one that the plan was made from.

    Raises:
        BapipeError: one is missing, or has other layers than the plan.
    """
    complete = dict(profiles)
    for kind, fingerprint in plan.profiles.items():
        if kind not in complete:
            cached = load_profile_by_fingerprint(fingerprint)
            if cached is None:
                raise BapipeError(
                    f"the {kind} profile that the plan was made from is not cached on this machine: give it in "
                    "`profiles`"
                )
            complete[kind] = cached
    planned = {name for stage in plan.stages for name in stage.layers}
    for kind, profile in complete.items():
        if planned != {layer.name for layer in profile.layers}:
            raise BapipeError(f"the {kind} profile, of {profile.model}, has other layers than the plan of {plan.model}")
    return complete


def lost_devices(plan: Plan, without: Collection[str], num_available: int) -> tuple[str, ...]:
    """Returns the names of the devices that are lost, whether the plan uses them or not.

    Those in `without` are lost. If more than `num_available` remain, the surplus counts as lost too: first devices
    without a stage, then the last of the others.

    Raises:
        BapipeError: the plan has no device of a name, or no device remains.
    """
    names = [device.name for device in plan.cluster.devices]
    for name in without:
        if name not in names:
            raise BapipeError(f"the plan has no device '{name}'; it has {', '.join(names)}")
    used = set(plan.used_devices)
    remaining = sorted((name for name in names if name not in set(without)), key=lambda name: name not in used)
    lost = {*without, *remaining[num_available:]}
    if not remaining[:num_available]:
        raise BapipeError("no device of the plan remains")
    return tuple(name for name in names if name in lost)


def num_available_devices(plan: Plan) -> int:
    """Returns how many devices there can be: the processes of the torchrun job, or the devices of this machine."""
    if (job := current_job()) is not None:
        return job.size
    from bapipe.torch_device import num_devices

    types = {type_of_kind(device.kind) for device in plan.cluster.devices}
    threads = plan.compute_settings.threads
    return sum(num_devices(one) // (threads if one == "cpu" else 1) for one in types if one is not None)


def replan(plan: Plan, lost: Collection[str], profiles: ProfilesByKind, num_processes: int | None) -> Plan:
    """Returns the best plan of the same mini-batch for the devices that are not lost.

    It keeps the micro-batch size if that fits, so that training continues as before, and the plan's memory limit. Each
    of `num_processes`, the processes of a job that runs already, gets a stage.

    Raises:
        Infeasible: nothing fits the remaining devices.
    """
    remaining = [rank for name, rank in plan.cluster.index.items() if name not in lost]
    cluster = with_devices(plan.cluster, remaining)
    schedules = tuple(dict.fromkeys(("1f1b", "gpipe", *_reproducible(plan.schedule))))
    memory = _memory_limit(plan.certificate)
    options = PlanOptions(
        minibatch_size=plan.minibatch_size,
        microbatch_size=plan.microbatch_size,
        schedules=schedules,
        memory_limit_bytes=None if memory.bytes_per_device is msgspec.UNSET else memory.bytes_per_device,
        memory_margin=memory.margin,
    )
    new_plan = _plan_any_size(profiles, cluster, options)
    if num_processes is not None and len(new_plan.used_devices) < num_processes:
        new_plan = _plan_any_size(profiles, cluster, replace(options, num_stages=num_processes, replicas=False))
    return msgspec.structs.replace(new_plan, factory=plan.factory, arguments=plan.arguments)


def _memory_limit(certificate: Certificate) -> MemoryLimit:
    """Returns the memory limit that a plan was made for.

    Of a plan with the least memory, only the margin is kept: its limit is what it needs itself, and fewer devices need
    more.
    """
    memory, goal = certificate.memory, certificate.goal
    if memory is msgspec.UNSET:
        return MemoryLimit()
    if goal is not msgspec.UNSET and goal.quantity == "memory":
        return MemoryLimit(margin=memory.margin)
    return memory


def _plan_any_size(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> Plan:
    """Returns the best plan with the micro-batch size of the options, or with any if that size does not fit."""
    try:
        return plan_once(profiles, cluster, options)
    except Infeasible:
        return plan_once(profiles, cluster, replace(options, microbatch_size=None))


def _reproducible(schedule: str) -> Sequence[str]:
    """Returns [schedule] if its name determines it, so that all ranks of a job plan with the same one; else []."""
    return [schedule] if schedule in ALL and schedule != "search" and schedule not in SIDE_BY_SIDE else []
