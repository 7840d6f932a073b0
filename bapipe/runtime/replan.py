"""Plan again for the devices that are left when some are gone."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import msgspec

from bapipe.errors import BapipeError, Infeasible, RunFailed
from bapipe.formats.cache import load_profile_by_fingerprint
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.options import PlanOptions
from bapipe.planner.plan import plan_once
from bapipe.runtime.train_result import TrainResult
from bapipe.schedules import ALL, SIDE_BY_SIDE


def run_on_what_is_left(
    plan: Plan,
    profiles: Mapping[str, ModelProfile],
    without: Collection[str],
    resume: bool,
    run: Callable[[Plan, bool], TrainResult],
    tell: Callable[[str, Plan], None],
) -> TrainResult:
    """Runs a plan, and one for the devices that are left wherever some are gone, before or while it runs.

    `run` gets the plan and whether to go on from a checkpoint. `tell` gets why there is another plan, and that plan.

    Raises:
        RunFailed: a rank failed of which the process did not die, or no device is left.
    """
    known = profiles_of_plan(plan, profiles)
    gone, current = devices_gone(plan, without, num_devices_left(plan)), plan
    if gone:
        current = replan(plan, gone, known, int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None)
        tell(f"without {', '.join(gone)}", current)
    while True:
        try:
            return run(current, resume)
        except RunFailed as error:
            gone = (*gone, *error.lost)
            if not error.lost or len(gone) == len(plan.cluster.devices):
                raise
            resume, current = True, replan(plan, gone, known, None)
            tell(str(error), current)


def profiles_of_plan(plan: Plan, given: Mapping[str, ModelProfile]) -> dict[str, ModelProfile]:
    """Returns profiles to plan with again: the given ones, else those that the plan was made from and that were kept.

    Raises:
        BapipeError: one is missing, or of other layers.
    """
    found = dict(given)
    for kind, known_as in plan.profiles.items():
        if kind not in found:
            kept = load_profile_by_fingerprint(known_as)
            if kept is None:
                raise BapipeError(
                    f"the {kind} profile that the plan was made from is not kept on this machine: give it with "
                    "--profile FILE"
                )
            found[kind] = kept
    planned = {name for stage in plan.stages for name in stage.layers}
    for kind, profile in found.items():
        if planned != {layer.name for layer in profile.layers}:
            raise BapipeError(f"the {kind} profile, of {profile.model}, has other layers than the plan of {plan.model}")
    return found


def devices_gone(plan: Plan, without: Collection[str], num_left: int) -> tuple[str, ...]:
    """Returns which devices are gone, of which the plan uses some; nothing where it can run as it is.

    Gone are those named, and where there are still more than `num_left`, the last: those without a stage first.

    Raises:
        BapipeError: a name that the plan does not know, or nothing is left.
    """
    names = [device.name for device in plan.cluster.devices]
    for name in without:
        if name not in names:
            raise BapipeError(f"the plan has no device '{name}'; it has {', '.join(names)}")
    used = {name for stage in plan.stages for name in stage.devices}
    left = sorted((name for name in names if name not in set(without)), key=lambda name: name not in used)
    gone = {*without, *left[num_left:]}
    if not gone & used:
        return ()
    if not left[:num_left]:
        raise BapipeError("no device of the plan is left")
    return tuple(name for name in names if name in gone)


def num_devices_left(plan: Plan) -> int:
    """Returns how many of the plan's devices can be there: the processes of the job, or what this machine has."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    from bapipe.torch_device import num_devices

    kinds = {device.kind for device in plan.cluster.devices}
    threads = 1 if plan.settings is msgspec.UNSET else plan.settings.threads
    return sum(num_devices(kind) // (threads if kind == "cpu" else 1) for kind in sorted(kinds))


def replan(plan: Plan, gone: Collection[str], profiles: Mapping[str, ModelProfile], num_processes: int | None) -> Plan:
    """Returns the best plan for the devices that are not gone, of the same mini-batch.

    It has the same micro-batches where they fit, so that training goes on as it would have. Of `num_processes`, those
    of a job that is there, each gets a stage.

    Raises:
        Infeasible: nothing fits what is left.
    """
    cluster = _without(plan.cluster, gone)
    schedules = tuple(dict.fromkeys(("1f1b", "gpipe", *_named(plan.schedule))))
    options = PlanOptions(minibatch_size=plan.minibatch_size, microbatch_size=plan.microbatch_size, schedules=schedules)
    made = _decide(profiles, cluster, options)
    used = {name for stage in made.stages for name in stage.devices}
    if num_processes is not None and len(used) < num_processes:
        made = _decide(profiles, cluster, replace(options, num_stages=num_processes, replicas=False))
    return msgspec.structs.replace(made, factory=plan.factory, arguments=plan.arguments)


def _decide(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> Plan:
    try:
        return plan_once(profiles, cluster, options)
    except Infeasible:
        return plan_once(profiles, cluster, replace(options, microbatch_size=None))


def _named(schedule: str) -> Sequence[str]:
    """The schedule where it is one that every rank of a job makes alike: a searched order may not be."""
    return [schedule] if schedule in ALL and schedule != "search" and schedule not in SIDE_BY_SIDE else []


def _without(cluster: Cluster, gone: Collection[str]) -> Cluster:
    return msgspec.structs.replace(
        cluster,
        devices=tuple(device for device in cluster.devices if device.name not in gone),
        links=tuple(link for link in cluster.links if link.source not in gone and link.target not in gone),
    )
