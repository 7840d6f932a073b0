"""Changes of a plan by hand: cuts, devices, schedule, sizes, recomputation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from bapipe.errors import BapipeError
from bapipe.field_types import check_fields
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan, check_plan
from bapipe.options import options_from
from bapipe.planner.inputs.profiles import Profiles, by_kind
from bapipe.planner.inputs.validation import unknown_schedule
from bapipe.planner.make import check_memory, default_devices, plan_of, with_recomputation
from bapipe.planner.results.decision import Decision, decision_of, simulate_decision
from bapipe.schedules import ALL
from bapipe.units import Positive

MOVE = re.compile(r"stage ([0-9]{1,9}) ([+-][0-9]{1,9})(?: layers?)?")
PLACE = re.compile(r"stage ([0-9]{1,9}) on (.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What to change in a plan; applied in the order of the attributes.

    Attributes:
        cuts: the first layer of each stage after the first, in place of the plan's cuts; none for one stage.
        schedule, minibatch_size, microbatch_size: None to keep them.
        place: such as `stage 1 on gpu2,gpu3`.
        swap: the names of two devices that exchange their stages.
        moves: such as `stage 1 +3 layers`, which takes the first three layers of the stage behind it (for the last
            stage: the last three of the one before it); `-3` gives as many away.
        recompute, keep: the numbers of stages that recompute their whole forward, and that keep all their stashes.
        recompute_layers: layers of other stages to recompute, besides those that such a stage names already; the rest
            of it keeps its stash, also if it recomputed as a whole.

    Raises:
        BapipeError: a value of another type, or out of range.
    """

    cuts: Sequence[str] | None = None
    schedule: str | None = None
    minibatch_size: Positive | None = None
    microbatch_size: Positive | None = None
    place: Sequence[str] = ()
    swap: tuple[str, str] | None = None
    moves: Sequence[str] = ()
    recompute: Sequence[int] = ()
    keep: Sequence[int] = ()
    recompute_layers: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(self)


def edit(plan: Plan, profiles: Profiles, changes: Changes | None = None, **keywords: Any) -> Plan:
    """Returns a plan with some changes and the prediction of the step that follows.

    The bound of the plan's certificate stays valid if cluster and mini-batch stay as they are.

    Args:
        changes: what to change; its fields may be given as keyword arguments instead, for example
            `bapipe.edit(plan, profile, moves=["stage 1 +3 layers"], schedule="zb-h1")`.

    Raises:
        Infeasible: the changed plan does not fit; the message says what each device lacks.
        BapipeError: a change that the plan does not allow.
        TypeError: an unknown change.
    """
    check_plan(plan)
    changes = options_from(Changes, changes, keywords)
    of_kind = by_kind(profiles)
    decision = apply(decision_of(plan), changes, plan.cluster)
    step = simulate_decision(decision, of_kind, plan.cluster)
    check_memory(step, plan.cluster)
    return plan_of(decision, of_kind, plan.cluster, step, changed_from=plan)


def apply(decision: Decision, changes: Changes, cluster: Cluster) -> Decision:
    """Returns the changed decision. A change of stages, devices or sizes gives it the order of its named schedule."""
    before = decision
    if changes.schedule is not None:
        if changes.schedule not in ALL:
            raise unknown_schedule(changes.schedule, ALL)
        decision = replace(decision, schedule=changes.schedule).following_schedule()
    sizes = changes.minibatch_size or decision.minibatch_size, changes.microbatch_size or decision.microbatch_size
    decision = replace(decision, minibatch_size=sizes[0], microbatch_size=sizes[1])
    if changes.cuts is not None:
        decision = _with_cuts(decision, changes.cuts)
    num_stages = len(decision.cuts) + 1
    stages_changed = num_stages != len(before.devices)
    if stages_changed or (changes.schedule is not None and not _fits_schedule(decision, cluster)):
        devices = default_devices(decision.schedule, num_stages, decision.num_microbatches, cluster)
        decision = replace(decision, devices=devices, recompute=(False,) * num_stages, recompute_layers=frozenset())
    for text in changes.place:
        decision = _placed(decision, text)
    if changes.swap is not None:
        decision = _swapped(decision, *changes.swap, cluster)
    for text in changes.moves:
        decision = _moved(decision, text)
    for s in (*changes.recompute, *changes.keep):
        _check_stage(s, decision)
    if both := sorted({*changes.recompute} & {*changes.keep}):
        raise BapipeError(
            f"stage {both[0]} is both to recompute its forward and to keep its activations: want one of them"
        )
    flags = tuple(old and s not in changes.keep for s, old in enumerate(decision.recompute))
    kept = {name for s in changes.keep for name in decision.stages[s].layers}
    decision = replace(decision, recompute=flags, recompute_layers=decision.recompute_layers - kept)
    decision = with_recomputation(decision, changes.recompute, changes.recompute_layers)
    if (decision.devices, decision.num_microbatches) != (before.devices, before.num_microbatches):
        decision = decision.following_schedule()
    return decision


def _fits_schedule(decision: Decision, cluster: Cluster) -> bool:
    """Returns whether the schedule can have the stages on their devices."""
    try:
        decision.table(cluster)
    except BapipeError:
        return False
    return True


def _with_cuts(decision: Decision, first_layers: Sequence[str]) -> Decision:
    index = {name: i for i, name in enumerate(decision.layers)}
    for name in first_layers:
        if name not in index:
            raise BapipeError(
                f"the plan has no layer '{name}'; its layers are '{decision.layers[0]}' to '{decision.layers[-1]}'"
            )
    return replace(decision, cuts=tuple(index[name] for name in first_layers))


def _placed(decision: Decision, text: str) -> Decision:
    match = PLACE.fullmatch(text.strip())
    if match is None:
        raise BapipeError(f"'{text}' places no stage: want 'stage 1 on gpu2', or 'stage 1 on gpu2,gpu3' for replicas")
    stage = int(match[1])
    _check_stage(stage, decision)
    devices = list(decision.devices)
    devices[stage] = tuple(name.strip() for name in match[2].split(","))
    return replace(decision, devices=tuple(devices))


def _swapped(decision: Decision, first: str, second: str, cluster: Cluster) -> Decision:
    for name in (first, second):
        if name not in cluster.index:
            raise BapipeError(f"`swap`: the cluster has no device '{name}'; it has {', '.join(cluster.index)}")
    other = {first: second, second: first}
    return replace(
        decision, devices=tuple(tuple(other.get(name, name) for name in replicas) for replicas in decision.devices)
    )


def _moved(decision: Decision, text: str) -> Decision:
    match = MOVE.fullmatch(text.strip())
    if match is None:
        raise BapipeError(f"'{text}' moves no layers: want 'stage 1 +3 layers' or 'stage 1 -3 layers'")
    stage, num_layers = int(match[1]), int(match[2])
    _check_stage(stage, decision)
    if not decision.cuts:
        raise BapipeError(f"'{text}': the plan has one stage, so there is no cut to move")
    is_last = stage == len(decision.cuts)
    cuts = list(decision.cuts)
    cuts[stage - is_last] += -num_layers if is_last else num_layers
    for s, (begin, end) in enumerate(pairwise((0, *cuts, len(decision.layers)))):
        if begin >= end:
            raise BapipeError(f"'{text}' leaves stage {s} without layers: move {begin - end + 1} fewer at least")
    return replace(decision, cuts=tuple(cuts))


def _check_stage(stage: int, decision: Decision) -> None:
    if stage not in range(len(decision.devices)):
        raise BapipeError(f"there is no stage {stage}: the plan has stages 0 to {len(decision.devices) - 1}")
