"""The pages of files: of a plan with its recorded steps, of two plans, of a profile, and of compared strategies."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from bapipe.errors import BapipeError
from bapipe.explorer.answers import Json, explained, layers_json, model_json, recorded_json, step_json, timeline_json
from bapipe.explorer.document import document, table_document, within_limit
from bapipe.explorer.session import Session
from bapipe.explorer.state import State
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile, ProfilesByKind
from bapipe.printable import counted
from bapipe.report.plan_changes import render_changes
from bapipe.report.strategies import StrategyTable
from bapipe.simulator.simulate import unit_cost_timeline
from bapipe.simulator.timeline import Timeline

PlanOfProfiles = tuple[str, Plan, ProfilesByKind]
"""A plan by its name, with the profiles of its kinds of devices, none if they are not at hand."""

Recorded = Sequence[tuple[str, Timeline]]
"""Named timelines of a step."""


def profile_page(profile: ModelProfile) -> bytes:
    """Returns the page of a profile: its layers, at the largest measured micro-batch size."""
    size = max(profile.microbatch_sizes)
    num_layers = len(profile.layers)
    state: Json = {"cuts": [], "devices": [[]], "recompute": [False], "constraints": [], "layer_order": None}
    data = {
        "live": False,
        "model": _model_of(profile) | {"state": state | {"microbatch_size": size}},
        "title": f"{profile.device.kind}, {profile.precision}, {counted(num_layers, 'layer')}, micro-batches of {size}",
        "tried": [],
        "layers": {str(size): layers_json(profile, size)},
    }
    return document(profile.model, data)


def plan_page(plan: Plan, profiles: ProfilesByKind, recorded: Recorded = ()) -> bytes:
    """Returns the page of a plan.

    Args:
        profiles: of its kinds of devices; without them the page has no times of layers, and draws the first of the
            recorded steps, or the order alone.
        recorded: steps of the plan that were predicted or measured; drawn on the same axis as the predicted one.
    """
    return plans_page([("plan", plan, profiles)], recorded)


def plans_page(plans: Sequence[PlanOfProfiles], recorded: Recorded = (), changes: Sequence[str] = ()) -> bytes:
    """Returns the page of named plans of one model, the first of them shown; see `plan_page`.

    Unless all have their profiles, none is simulated: the page has the figures of their files.

    Raises:
        BapipeError: the plans are not of the same layers.
    """
    _check_same_layers(plans)
    if not all(profiles for _, _, profiles in plans):
        plans = [(name, plan, {}) for name, plan, _ in plans]
    _, first, of_first = plans[0]
    entry = _entry if of_first else _entry_without_profiles
    entries = (
        entry(name, plan, profiles, recorded if plan is first else ())
        | ({} if profiles == of_first else {"layers": _layers(plan, profiles)})
        for name, plan, profiles in plans
    )
    layers = {str(plan.microbatch_size): _layers(plan, profiles) for _, plan, profiles in plans if profiles == of_first}
    data = {
        "live": False,
        "model": _model(first, of_first),
        "layers": dict(sorted(layers.items())),
        "tried": list(within_limit(entries)),
        "changes": list(changes),
        "marked": len(plans) == 2,
        "open": "stage-panel" if len(plans) == 1 else "try-panel",
    }
    return document(first.model, data)


def two_plans_page(before: PlanOfProfiles, after: PlanOfProfiles) -> bytes:
    """Returns the page of two plans of one model, side by side, with their differences."""
    return plans_page([before, after], (), tuple(render_changes(before[1], after[1])))


def strategies_page(table: StrategyTable) -> bytes:
    """Returns the page of compared strategies: a row for each."""
    return table_document(table.title, table.html())


def _check_same_layers(plans: Sequence[PlanOfProfiles]) -> None:
    """Raises BapipeError if plans are not of the same layers, or their profiles have these in other orders."""
    _, first, of_first = plans[0]
    for _, plan, profiles in plans[1:]:
        if sorted(_names(plan, {})) != sorted(_names(first, {})):
            raise BapipeError(f"plans of different layers, of {first.model} and {plan.model}: show each by itself")
        if profiles and of_first and _names(plan, profiles) != _names(first, of_first):
            raise BapipeError("the profiles of the plans have their layers in different orders: show each by itself")


def _names(plan: Plan, profiles: ProfilesByKind) -> list[str]:
    """Returns the names of the layers in the order of the profile; without one in that of the plan."""
    if profiles:
        return [layer.name for layer in _shown(plan, profiles).layers]
    return [name for stage in plan.stages for name in stage.layers]


def _shown(plan: Plan, profiles: ProfilesByKind) -> ModelProfile:
    """Returns the profile of which a page has the times of layers."""
    return profiles[plan.cluster.devices[0].kind]


def _model(plan: Plan, profiles: ProfilesByKind) -> Json:
    """Returns the model; without profiles the names of its layers alone."""
    if profiles:
        return _model_of(_shown(plan, profiles))
    layers = [{"name": name, "kind": ""} for name in _names(plan, {})]
    return {"model": plan.model, "legal": [], "schedules": [], "layers": layers, "rails": []}


def _layers(plan: Plan, profiles: ProfilesByKind) -> Json:
    """Returns the times and bytes of layers at the micro-batch size of a plan; without profiles that none is known."""
    if profiles:
        return layers_json(_shown(plan, profiles), plan.microbatch_size)
    nothing = [0] * len(_names(plan, {}))
    return {**dict.fromkeys(("F", "I", "W", "stash", "params"), nothing), "cut": [0, *nothing], "isKnown": False}


def _model_of(profile: ModelProfile) -> Json:
    return model_json(profile) | {"legal": [], "schedules": []}


def _entry(name: str, plan: Plan, profiles: ProfilesByKind, recorded: Recorded) -> Json:
    session = Session(profiles, plan.cluster, plan)
    predicted = session.simulate(session.first)[2].timeline().spans if recorded else ()
    measured = recorded_json([(title, timeline) for title, timeline in recorded if timeline.spans != predicted])
    answer = session.judge(session.first) | {"measured": measured} | _unjudged(plan)
    return {"name": name, "state": msgspec.to_builtins(session.first), "answer": answer}


def _entry_without_profiles(name: str, plan: Plan, profiles: ProfilesByKind, recorded: Recorded) -> Json:
    """Returns a plan with the figures in its file, and with the first recorded step or the order alone as its step."""
    timeline = recorded[0][1] if recorded else unit_cost_timeline(plan)
    prediction = plan.prediction if plan.is_judged else timeline.prediction(plan.minibatch_size)
    bound: Json = {"ns": plan.certificate.lower_bound_ns, "space": plan.certificate.space, "searched": True}
    answer = step_json(prediction, timeline.columns(), plan.cluster, bound)
    if recorded and plan.is_judged and timeline.step_ns == prediction.step_ns:
        answer = explained(answer, prediction, timeline, plan.cluster)
    elif recorded:  # measured: between two actions pass moments that nothing explains, and the figures are predicted
        answer["drawn"] = recorded[0][0]
    else:
        answer["orderOnly"] = True
        answer["timeline"] = timeline_json(timeline.columns()) | {"memory": []}
    return {
        "name": name,
        "state": msgspec.to_builtins(_state_of(plan)),
        "answer": answer | {"measured": recorded_json(recorded[1:])} | _unjudged(plan),
    }


def _unjudged(plan: Plan) -> Json:
    """Why the file of a plan has no figures, if it has none."""
    return {} if plan.is_judged else {"unjudged": plan.certificate.space}


def _state_of(plan: Plan) -> State:
    return State(
        cuts=tuple(accumulate(len(stage.layers) for stage in plan.stages))[:-1],
        devices=tuple(stage.devices for stage in plan.stages),
        recompute=tuple(stage.recompute for stage in plan.stages),
        schedule=plan.schedule,
        minibatch_size=plan.minibatch_size,
        microbatch_size=plan.microbatch_size,
        num_devices=len(plan.cluster.devices),
    )
