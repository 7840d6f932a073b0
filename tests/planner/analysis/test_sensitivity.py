"""The effect of more of a resource equals that in the simulator, or that of planning again."""

from msgspec.structs import replace

from bapipe.planner.analysis.pinned import certify_pinned
from bapipe.planner.analysis.sensitivity import MEMORY, UNLIMITED_MEMORY, sensitivity
from bapipe.planner.edit import edit
from bapipe.planner.inputs.options import PlanOptions
from bapipe.simulator.simulate import simulate
from tests.builders import chain, devices
from tests.step_time import plan_step_time

OPTIONS = PlanOptions(minibatch_size=4, schedules=("1f1b",), replicas=False)


def test_a_faster_bottleneck_helps_and_every_effect_is_simulated() -> None:
    profiles = {"a": chain([1, 5], output_bytes=10**6)}
    plan = plan_step_time(profiles, devices(2), OPTIONS)
    effects = {effect.resource: effect for effect in sensitivity(plan, profiles, OPTIONS)}
    (busiest,) = plan.stages[1].devices
    faster = tuple(replace(d, speed=1.1) if d.name == busiest else d for d in plan.cluster.devices)
    changed = replace(plan, cluster=replace(plan.cluster, devices=faster))
    effect = effects[f"speed of {busiest}"]
    assert effect.step_ns == simulate(changed, profiles).step_ns < plan.prediction.step_ns
    assert not effect.is_replanned


def test_more_memory_helps_only_a_plan_that_memory_limits() -> None:
    profiles = {"a": chain([1, 1], param_bytes=1000, stash_bytes=1000)}
    rich = plan_step_time(profiles, devices(2), OPTIONS)
    limit = max(rank.peak_bytes for rank in rich.prediction.ranks) - 1
    limited_options = PlanOptions(minibatch_size=4, schedules=("1f1b",), replicas=False, memory_limit_bytes=limit)
    limited = plan_step_time(profiles, devices(2), limited_options)
    assert limited.prediction.step_ns > rich.prediction.step_ns
    for plan, options, saves in ((rich, OPTIONS, False), (limited, limited_options, True)):
        effects = {effect.resource: effect for effect in sensitivity(plan, profiles, options)}
        assert effects[UNLIMITED_MEMORY].step_ns == rich.prediction.step_ns
        assert effects[MEMORY].step_ns == rich.prediction.step_ns
        assert (effects[MEMORY].step_ns < plan.prediction.step_ns) is saves


def test_more_memory_is_worth_nothing_where_a_better_plan_needs_no_more() -> None:
    profile = chain([3, 1, 3, 1], param_bytes=1000, stash_bytes=1000)
    best = plan_step_time({"a": profile}, devices(2), OPTIONS)
    uneven = edit(best, profile, moves=["stage 0 +1 layers"])
    pinned = certify_pinned(uneven, {"a": profile}, OPTIONS)
    by_hand = replace(pinned, alternatives=())
    for plan in (pinned, by_hand):
        assert plan.prediction.step_ns > best.prediction.step_ns
        effects = {effect.resource: effect for effect in sensitivity(plan, {"a": profile}, OPTIONS)}
        for resource in (MEMORY, UNLIMITED_MEMORY):
            assert effects[resource].without_ns == effects[resource].step_ns == best.prediction.step_ns


def test_effects_are_sorted_by_the_step_time_they_give() -> None:
    profiles = {"a": chain([1, 3, 2], output_bytes=10**5)}
    plan = plan_step_time(profiles, devices(3), OPTIONS)
    steps = [effect.step_ns for effect in sensitivity(plan, profiles, OPTIONS)]
    assert steps == sorted(steps)


def test_what_other_options_are_worth_is_not_worth_of_memory() -> None:
    """A plan that is proven optimal with one stage, explained with the options of any number: there is memory enough."""
    profile, cluster = chain([1, 1, 1, 1]), devices(2)
    alone = plan_step_time({"a": profile}, cluster, PlanOptions(minibatch_size=4, num_stages=1, replicas=False))
    assert alone.certificate.proven_optimal
    effects = {e.resource: e for e in sensitivity(alone, {"a": profile}, PlanOptions(minibatch_size=4))}
    for resource in (MEMORY, UNLIMITED_MEMORY):
        assert effects[resource].step_ns == effects[resource].without_ns < alone.prediction.step_ns
