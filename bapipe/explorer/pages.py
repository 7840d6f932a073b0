"""The pages of files: of a plan with its recorded steps, of two plans, of a profile, and of compared strategies."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from bapipe.errors import BapipeError
from bapipe.explorer.answers import Json, explained, layers_json, model_json, recorded_json, step_json, timeline_json
from bapipe.explorer.document import document, within_limit
from bapipe.explorer.session import Session
from bapipe.explorer.state import State
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.report.plan_changes import render_changes
from bapipe.simulator.simulate import unit_cost_timeline
from bapipe.simulator.timeline import Timeline

Profiles = Mapping[str, ModelProfile]
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
        "title": f"{profile.device.kind}, {profile.precision}, {num_layers} layers, micro-batches of {size}",
        "tried": [],
        "layers": {str(size): layers_json(profile, size)},
    }
    return document(profile.model, data)


def plan_page(plan: Plan, profiles: Profiles, recorded: Recorded = ()) -> bytes:
    """Returns the page of a plan.

    Args:
        profiles: of its kinds of devices; without them the page has no times of layers, and draws the first of the
            recorded steps, or the order alone.
        recorded: steps of the plan that were predicted or measured; drawn on the same axis as the predicted one.
    """
    return plans_page([("plan", plan)], profiles, recorded)


def plans_page(
    plans: Sequence[tuple[str, Plan]], profiles: Profiles, recorded: Recorded = (), changes: Sequence[str] = ()
) -> bytes:
    """Returns the page of named plans of one model, the first of them shown; see `plan_page`.

    Raises:
        BapipeError: the plans are not of the same layers.
    """
    _, first = plans[0]
    names = sorted(name for stage in first.stages for name in stage.layers)
    for _, plan in plans[1:]:
        if sorted(name for stage in plan.stages for name in stage.layers) != names:
            raise BapipeError(f"plans of different layers, of {first.model} and {plan.model}: show each by itself")
    entry = _entry if profiles else _entry_without_profiles
    entries = (entry(name, plan, profiles, recorded if plan is first else ()) for name, plan in plans)
    data = _layers(first, profiles, {plan.microbatch_size for _, plan in plans}) | {
        "live": False,
        "tried": list(within_limit(entries)),
        "changes": list(changes),
        "marked": len(plans) == 2,
        "open": "stage-panel" if len(plans) == 1 else "try-panel",
    }
    return document(first.model, data)


def two_plans_page(before: tuple[str, Plan], after: tuple[str, Plan], profiles: Profiles) -> bytes:
    """Returns the page of two plans of one model, side by side, with their differences."""
    return plans_page([before, after], profiles, (), tuple(render_changes(before[1], after[1])))


def _layers(plan: Plan, profiles: Profiles, sizes: set[int]) -> Json:
    """Returns the model and its layers; without profiles their names alone, in the order of the plan."""
    if profiles:
        profile = profiles[plan.cluster.devices[0].kind]
        layers = {str(size): layers_json(profile, size) for size in sorted(sizes)}
        return {"model": _model_of(profile), "layers": layers}
    names = [name for stage in plan.stages for name in stage.layers]
    nothing = [0] * len(names)
    unknown: Json = {**dict.fromkeys(("F", "I", "W", "stash"), nothing), "cut": [0, *nothing], "isKnown": False}
    model = {"layers": [{"name": name, "kind": "", "params": 0} for name in names], "rails": []}
    return {
        "model": {"model": plan.model, "legal": [], "schedules": [], **model},
        "layers": {str(size): unknown for size in sorted(sizes)},
    }


def _model_of(profile: ModelProfile) -> Json:
    return model_json(profile) | {"legal": [], "schedules": []}


def _entry(name: str, plan: Plan, profiles: Profiles, recorded: Recorded) -> Json:
    session = Session(profiles, plan.cluster, plan)
    predicted = session.simulate(session.first)[2].timeline().spans if recorded else ()
    measured = recorded_json([(title, timeline) for title, timeline in recorded if timeline.spans != predicted])
    answer = session.judge(session.first) | {"measured": measured} | _unjudged(plan)
    return {"name": name, "state": msgspec.to_builtins(session.first), "answer": answer}


def _entry_without_profiles(name: str, plan: Plan, profiles: Profiles, recorded: Recorded) -> Json:
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
