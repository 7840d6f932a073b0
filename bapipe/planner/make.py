"""Plans made by hand: a decision, the step that the simulator predicts for it, and a bound on all other plans."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from numbers import Integral
from typing import TypeVar

import msgspec

from bapipe.errors import BapipeError, Infeasible
from bapipe.formats.certificate import (
    BY_HAND,
    NOT_CERTIFIED,
    OVER_LIMIT,
    Certificate,
    MemoryLimit,
    certify,
    searched_space,
)
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import fingerprint
from bapipe.formats.plan import Plan, with_certificate
from bapipe.formats.prediction import Prediction
from bapipe.formats.profile import LOSS, ProfilesByKind
from bapipe.formats.stage_plan import check_replicas, has_idle_replicas
from bapipe.planner.inputs.clusters import as_cluster
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import Profiles, by_kind
from bapipe.planner.inputs.validation import check_inputs, microbatch_sizes
from bapipe.planner.results.decision import Decision, check_devices, simulate_decision
from bapipe.planner.results.searched_space import is_of_stages
from bapipe.planner.results.solution import uncertified_plan
from bapipe.planner.results.work_bound import WORK_BOUND, work_bound_ns
from bapipe.schedules import LOOPED
from bapipe.simulator.tied_weights import legal_cuts
from bapipe.simulator.timeline import StepColumns, Timeline

T = TypeVar("T")

ANY_PLAN = f"any plan for this cluster and mini-batch (made by hand; bound from {WORK_BOUND})"


def make(
    profiles: Profiles,
    cluster: Cluster | int,
    *,
    minibatch_size: int = 32,
    microbatch_size: int | None = None,
    schedule: str = "1f1b",
    cuts: Iterable[str | int] | None = None,
    num_stages: int | None = None,
    devices: Sequence[str | Sequence[str]] | None = None,
    recompute: Sequence[int] = (),
    recompute_layers: Sequence[str] = (),
) -> Plan:
    """Returns the plan of some decisions, with its prediction and a lower bound on the step of every plan.

    Args:
        profiles: one per kind of device.
        cluster: the devices and links; or a number of devices like the profiled one, with assumed links.
        microbatch_size: if left out, the fastest of the measured ones that fits.
        cuts: the first layer of each stage after the first, as a name or as the number of layers before it. If left
            out, the stages take about equally long.
        num_stages: if left out, and `cuts` and `devices` too, as many as the schedule has on all devices.
        devices: the name of the device of each stage, or the names of its replicas. If left out, the stages take the
            cluster's devices in order, one each or as the schedule says.
        recompute: the numbers of the stages that recompute their forward.
        recompute_layers: layers of other stages to recompute, where the rest of the stage keeps its activations.

    Raises:
        Infeasible: the plan does not fit; the message says what each device lacks.
        BapipeError: the arguments do not match.
    """
    profiles = by_kind(profiles)
    cluster = as_cluster(cluster, profiles)
    options = PlanOptions(
        minibatch_size=minibatch_size, microbatch_size=microbatch_size, num_stages=num_stages, schedules=[schedule]
    )
    check_inputs(profiles, cluster, options)
    minibatch_size = options.minibatch_size  # an `int`, where it was one of numpy
    layers = next(iter(profiles.values())).layers
    at = None if cuts is None else _cut_positions(cuts, [layer.name for layer in layers])
    if at is not None and num_stages not in (None, len(at) + 1):
        raise BapipeError(f"{len(at)} `cuts` make {len(at) + 1} stages, not `num_stages` {num_stages}: leave one out")
    judged = []
    for size in _sizes(profiles, cluster, options):
        of_stages = _devices_of_stages(
            devices, num_stages if at is None else len(at) + 1, schedule, minibatch_size // size, cluster
        )
        decision = with_recomputation(
            balanced_decision(profiles, cluster, of_stages, schedule, minibatch_size, size, at),
            recompute,
            recompute_layers,
        )
        step = simulate_decision(decision, profiles, cluster)
        lacks = max(lacking_bytes(step, cluster).values(), default=0)
        is_idle = has_idle_replicas(map(len, decision.devices), decision.num_microbatches)
        judged.append((is_idle, lacks, step.step_ns, size, decision, step))
    *_, decision, step = min(judged, key=lambda found: found[:4])
    check_memory(step, cluster)
    return plan_of(decision, profiles, cluster, step)


def balanced_decision(
    profiles: ProfilesByKind,
    cluster: Cluster,
    devices: tuple[tuple[str, ...], ...],
    schedule: str,
    minibatch_size: int,
    microbatch_size: int,
    cuts: tuple[int, ...] | None = None,
) -> Decision:
    """Returns stages without recomputation, which take equally long if no `cuts` are given.

    Args:
        devices: the names of the devices of each stage.
    """
    layers = next(iter(profiles.values())).layers
    return Decision(
        layers=tuple(layer.name for layer in layers),
        cuts=_balanced_cuts(profiles, cluster, microbatch_size, devices) if cuts is None else cuts,
        devices=devices,
        recompute=(False,) * len(devices),
        schedule=schedule,
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
    )


def plan_of(
    decision: Decision,
    profiles: ProfilesByKind,
    cluster: Cluster,
    step: StepColumns,
    changed_from: Plan | None = None,
) -> Plan:
    """Returns the plan of a decision whose step is known.

    Args:
        changed_from: a plan whose lower bound holds for this one too if it has the same inputs.

    Raises:
        BapipeError: replicas of a stage have no micro-batch, so nothing can run the plan.
    """
    check_replicas(decision.stages, decision.minibatch_size, decision.microbatch_size)
    plan = uncertified_plan(
        profiles,
        cluster,
        minibatch_size=decision.minibatch_size,
        microbatch_size=decision.microbatch_size,
        schedule=decision.schedule,
        table=decision.table(cluster),
        stages=decision.stages,
        prediction=step.prediction(decision.minibatch_size),
    )
    return with_certificate(plan, certificate_by_hand(plan, profiles, changed_from))


def certificate_by_hand(plan: Plan, profiles: ProfilesByKind, changed_from: Plan | None = None) -> Certificate:
    """Returns the certificate of a plan that no search made: a bound from the work, or from another plan's search."""
    step_ns, bound_ns = plan.prediction.step_ns, work_bound_ns(profiles, plan.cluster, plan.minibatch_size)
    # A plan outside the space that was searched may be faster than all plans of the space.
    if changed_from is not None and _same_inputs(plan, changed_from):
        proven = changed_from.certificate
        is_of_others = is_of_stages(proven) and not _same_stages(plan, changed_from)
        if not is_of_others and bound_ns < proven.lower_bound_ns <= step_ns:
            space = searched_space(proven).removesuffix(OVER_LIMIT).removesuffix(BY_HAND) + BY_HAND
            exceeds = exceeds_limit(plan.prediction, plan.cluster, proven.memory)
            return certify(step_ns, proven.lower_bound_ns, space + OVER_LIMIT * exceeds, proven.memory)
    return certify(step_ns, bound_ns, ANY_PLAN)


def judge(plan: Plan, profiles: ProfilesByKind, timeline: Timeline) -> Plan:
    """Returns a plan with the prediction of its timeline; its certificate only if it holds for that prediction."""
    prediction = timeline.prediction(plan.minibatch_size)
    same_profiles = all(plan.profiles.get(kind) in (None, fingerprint(of)) for kind, of in profiles.items())
    if plan.certificate.lower_bound_ns and same_profiles and prediction.step_ns == plan.prediction.step_ns:
        prediction = msgspec.structs.replace(prediction, load_ns=plan.prediction.load_ns)
        return msgspec.structs.replace(plan, prediction=prediction)
    now = {kind: fingerprint(of_kind) for kind, of_kind in sorted(profiles.items())}
    plan = msgspec.structs.replace(
        plan, profiles=now, prediction=prediction, certificate=NOT_CERTIFIED, alternatives=()
    )
    return with_certificate(plan, certificate_by_hand(plan, profiles))


def exceeds_limit(prediction: Prediction, cluster: Cluster, memory: MemoryLimit | msgspec.UnsetType) -> bool:
    """Returns whether a device needs more than a limit allows; a bound proven under the limit is none of such plans."""
    if memory is msgspec.UNSET:
        return False
    usable = {device.name: memory.usable_bytes(device.memory_bytes) for device in cluster.devices}
    return any(rank.peak_bytes > usable[rank.device] for rank in prediction.ranks)


def _same_stages(plan: Plan, other: Plan) -> bool:
    return (plan.stages, plan.microbatch_size) == (other.stages, other.microbatch_size)


def _same_inputs(plan: Plan, other: Plan) -> bool:
    names = "profiles", "cluster", "minibatch_size", "objective"
    return all(getattr(plan, name) == getattr(other, name) for name in names)


def lacking_bytes(step: StepColumns, cluster: Cluster) -> dict[str, int]:
    """Returns for each device that lacks memory how many bytes."""
    held = zip(cluster.devices, step.memory, strict=True)
    return {device.name: lack for device, memory in held if (lack := memory.total - device.memory_bytes) > 0}


def check_memory(step: StepColumns, cluster: Cluster) -> None:
    """Raises Infeasible if a device lacks memory."""
    if lacks := lacking_bytes(step, cluster):
        raise Infeasible(
            f"the plan does not fit: {', '.join(f'{name} lacks {lack:,} bytes' for name, lack in lacks.items())}. "
            "Move a cut, recompute a stage or some layers, or take a smaller `microbatch_size`"
        )


def _cut_positions(cuts: Iterable[str | int], names: Sequence[str]) -> tuple[int, ...]:
    """Returns how many layers are before each cut."""
    if isinstance(cuts, str) or not isinstance(cuts, Iterable):
        raise BapipeError(f"`cuts` is {cuts!r}: want a list of layers, such as ['{names[len(names) // 2]}']")
    index = {name: i for i, name in enumerate(names)}
    cuts = tuple(cuts)
    for cut in cuts:
        if isinstance(cut, bool) or not isinstance(cut, str | Integral):
            raise BapipeError(f"`cuts` has {cut!r}: want the name of a layer, or how many layers are before the cut")
        if isinstance(cut, str) and cut not in index:
            raise BapipeError(
                f"no layer is named '{cut}': cut before one of the {len(names)} layers, '{names[0]}' to '{names[-1]}'"
            )
    return tuple(index[cut] if isinstance(cut, str) else int(cut) for cut in cuts)


def _sizes(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> list[int]:
    """Returns the micro-batch sizes to try: the measured ones that divide the mini-batch, else all that divide it."""
    sizes = microbatch_sizes(profiles, cluster, options)
    measured = {size for profile in profiles.values() for size in profile.microbatch_sizes}
    return [size for size in sizes if size in measured] or sizes


def _devices_of_stages(
    given: Sequence[str | Sequence[str]] | None,
    num_stages: int | None,
    schedule: str,
    num_microbatches: int,
    cluster: Cluster,
) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the devices of each stage."""
    if given is not None:
        is_list = isinstance(given, Iterable) and not isinstance(given, str)
        listed = tuple(given) if is_list else ()
        if not is_list or not all(isinstance(replicas, Iterable) for replicas in listed):
            raise BapipeError(
                f"`devices` is {given!r}: want a list of the device, or of a list of replicas, of each stage"
            )
        devices = tuple((replicas,) if isinstance(replicas, str) else tuple(replicas) for replicas in listed)
        if not devices:
            raise BapipeError("`devices` is empty: name the device of each stage, or leave it out")
        check_devices(devices, cluster)
        if num_stages not in (None, len(devices)):
            given_for = f"{len(devices)} `devices` for {num_stages} stages"
            raise BapipeError(f"{given_for}: want one, or a list of replicas, each")
        return devices
    return default_devices(schedule, num_stages, num_microbatches, cluster)


def default_devices(
    schedule: str, num_stages: int | None, num_microbatches: int, cluster: Cluster
) -> tuple[tuple[str, ...], ...]:
    """Returns the cluster's devices in order, one for each stage, or as a schedule with several stages each says."""
    names = [device.name for device in cluster.devices]
    if schedule not in LOOPED:
        if (num_stages or 1) > len(names):
            raise BapipeError(f"{num_stages} stages on {len(names)} devices: want at most one stage for each device")
        return tuple((name,) for name in names[:num_stages])
    counts = range(2, 2 * len(names) + 1, 2)  # two stages on each of some devices
    wanted = counts[-1] if num_stages is None else num_stages
    if wanted not in counts:
        possible = ", ".join(map(str, counts))
        raise BapipeError(f"schedule '{schedule}' on {len(names)} devices has {possible} stages, not {num_stages}")
    return tuple((names[position],) for (position,) in LOOPED[schedule](wanted // 2, num_microbatches).devices)


def with_recomputation(decision: Decision, recompute: Sequence[int], recompute_layers: Sequence[str]) -> Decision:
    """Returns a decision in which some whole stages, and some layers of other stages, are recomputed besides.

    A stage that recomputes all of its layers, and has one of `recompute_layers`, recomputes these only.

    Raises:
        BapipeError: there is no such stage or layer, or the stage of a layer is in `recompute`.
    """
    recompute, recompute_layers = _listed("recompute", recompute), _listed("recompute_layers", recompute_layers)
    num_stages = len(decision.devices)
    stage_of = {name: s for s, stage in enumerate(decision.stages) for name in stage.layers}
    for stage in recompute:
        if isinstance(stage, bool) or stage not in range(num_stages):
            raise BapipeError(f"`recompute` names stage {stage}; there are stages 0 to {num_stages - 1}")
    for name in recompute_layers:
        if name not in stage_of or name == LOSS:
            why = "the plan has no such layer" if name not in stage_of else "that is possible with its whole stage only"
            raise BapipeError(f"`recompute_layers` names '{name}': {why}")
        if stage_of[name] in recompute:
            raise BapipeError(
                f"stage {stage_of[name]} is both to recompute its forward and to recompute '{name}' alone: want one of "
                "`recompute` and `recompute_layers`"
            )
    in_part = {stage_of[name] for name in recompute_layers}
    whole = {s for s, stage in enumerate(decision.stages) if stage.recomputed == stage.layers} - in_part
    whole |= set(recompute)
    named = decision.recompute_layers | frozenset(recompute_layers)
    return replace(
        decision,
        recompute=tuple(s in whole | {stage_of[name] for name in named} for s in range(num_stages)),
        recompute_layers=frozenset(name for name in named if stage_of[name] not in whole),
    )


def _listed(option: str, given: Iterable[T]) -> tuple[T, ...]:
    """Returns what an option lists; raises BapipeError for a single number or name."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise BapipeError(f"`{option}` is {given!r}: want a list, such as [{given!r}]")
    return tuple(given)


def _balanced_cuts(
    profiles: ProfilesByKind, cluster: Cluster, size: int, devices: Sequence[Sequence[str]]
) -> tuple[int, ...]:
    """Returns cuts such that every stage takes about as long, on devices that share the time of their stages."""
    from bapipe.planner.stages.nearest_cuts import nearest_cuts  # loads numpy

    index, num_uses = cluster.index, [name for replicas in devices for name in replicas]
    shares = [sum(cluster.devices[index[n]].speed / num_uses.count(n) for n in replicas) for replicas in devices]
    profile = profiles[cluster.devices[index[devices[0][0]]].kind]
    work_ns = [0, *accumulate(m.forward_backward_ns for m in profile.at(size))]
    boundaries = [0, *legal_cuts(profile.layers), len(profile.layers)]
    if len(devices) >= len(boundaries):
        raise BapipeError(f"{len(devices)} stages: the model allows {len(boundaries) - 1} at most; take fewer")
    targets_ns = [work_ns[-1] * done / sum(shares) for done in list(accumulate(shares))[:-1]]
    nearest = nearest_cuts([work_ns[boundary] for boundary in boundaries], targets_ns)
    return tuple(boundaries[at] for at in nearest)
