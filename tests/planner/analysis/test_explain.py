"""What the sentences of an explanation say for each form of a plan."""

import pytest
from msgspec.structs import replace

from bapipe.errors import BapipeError
from bapipe.formats.certificate import certify
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.analysis.explain import TOPICS, _over_cuts, _strategy, explain
from bapipe.planner.analysis.gap import explain_gap
from bapipe.planner.analysis.time_balanced import time_balanced_plan
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.make import make
from bapipe.planner.stages.chain import Chain
from bapipe.simulator.stage import StageCost
from tests.builders import chain, devices
from tests.step_time import plan_step_time


def planned(forward_ms: list[int], num_devices: int, **options: object) -> tuple[Plan, dict[str, ModelProfile]]:
    profiles = {"a": chain(forward_ms)}
    return plan_step_time(profiles, devices(num_devices), PlanOptions(minibatch_size=4, **options)), profiles  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_devices", "options", "strategy"),
    [
        (1, {}, "One device: d0 runs all layers."),
        (2, {"num_stages": 1}, "Data parallelism: 2 devices run all layers and sum their gradients."),
        (2, {"replicas": False}, "A pipeline of 2 stages, one device each."),
        (3, {"replicas": False, "num_stages": 2}, "A pipeline of 2 stages, one device each; unused: d2."),
        (
            9,
            {"replicas": False, "num_stages": 2},
            "A pipeline of 2 stages, one device each; unused: d2, d3, d4, d5, 3 other devices.",
        ),
        (2, {"schedules": ("interleaved-1f1b",)}, "A pipeline of 4 stages, several on each of 2 devices."),
    ],
)
def test_the_first_sentence_names_the_strategy(num_devices: int, options: dict[str, object], strategy: str) -> None:
    plan, profiles = planned([1, 1, 1, 1], num_devices, **options)
    assert explain(plan, profiles, PlanOptions(minibatch_size=4))[0] == strategy


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(BapipeError, match=r"^unknown schedule 'x'; choose from"):
        explain(*planned([1, 1], 2), PlanOptions(minibatch_size=4, schedules=("x",)))


def strategy_of(counts: list[int]) -> str:
    """The first sentence about stages of a layer each, on so many devices each."""
    names = iter(f"d{i}" for i in range(sum(counts)))
    groups = [[next(names) for _ in range(count)] for count in counts]
    cuts = list(range(1, len(counts)))
    profile = chain([1] * len(counts))
    return _strategy(make(profile, devices(sum(counts)), minibatch_size=8, cuts=cuts, devices=groups))


def test_all_stages_of_a_pipeline_with_replicas_are_counted() -> None:
    named = "stage 0 ('l0' to 'l0') on 2 devices"
    assert strategy_of([2, 1]) == f"A pipeline of 2 stages with replicas: {named}, the other stage on one device."
    assert strategy_of([2, 1, 1]) == (
        f"A pipeline of 3 stages with replicas: {named}, the other 2 stages on one device each."
    )
    assert strategy_of([2, 4]) == f"A pipeline of 2 stages with replicas: {named}, stage 1 ('l1' to 'l1') on 4 devices."
    many = strategy_of([2] * 7 + [1])
    assert many.endswith(
        "stage 3 ('l3' to 'l3') on 2 devices, 3 other stages with replicas, the other stage on one device."
    )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([2_000_000, 1_000_000], "2, 1 MB over the cuts"),
        ([1_000_000] * 4 + [3_500_000] + [2_000_000] * 506, "1 to 3.5 MB over each of 511 cuts (most behind stage 4)"),
        ([1_000_000] * 9, "1 MB over each of 9 cuts"),
    ],
)
def test_of_many_cuts_the_least_and_the_most_bytes_are_named(sizes: list[int], words: str) -> None:
    assert _over_cuts(sizes) == words


def test_a_step_that_takes_no_time_cannot_be_shortened() -> None:
    plan, profiles = planned([0, 0], 2)
    words = explain(plan, profiles, PlanOptions(minibatch_size=4))
    assert words[7] == "Step time saved by 10 % more of one resource: none."


def test_cuts_that_balance_compute_are_found_over_all_cuts() -> None:
    plan, profiles = planned([4, 1, 1, 1, 1], 2, replicas=False, schedules=("1f1b",))
    first, second = plan.stages
    names = tuple(layer.name for layer in profiles["a"].layers)
    unbalanced = replace(plan, stages=(replace(first, layers=names[:4]), replace(second, layers=names[4:])))
    balanced = time_balanced_plan(unbalanced, profiles)
    assert balanced is not None
    assert [len(stage.layers) for stage in balanced.stages] == [1, 4]


def test_balanced_cuts_leave_no_stage_with_the_recomputed_layers_of_another() -> None:
    plan, profiles = planned([4, 1, 1, 1, 1], 2, replicas=False, schedules=("1f1b",))
    first, second = plan.stages
    names = tuple(layer.name for layer in profiles["a"].layers)
    some = replace(first, layers=names[:4], recompute=True, recompute_layers=names[1:3])
    balanced = time_balanced_plan(replace(plan, stages=(some, replace(second, layers=names[4:]))), profiles)
    assert balanced is not None
    assert balanced.stages[0].recomputed == names[:1]


def test_an_order_that_cannot_be_cut_so_often_has_no_balanced_plan() -> None:
    """Layers that must stay together alternate, and the plan is cut along another order."""
    plan, profiles = planned([1, 1, 1, 1], 2, replicas=False, schedules=("1f1b",))
    layers = profiles["a"].layers
    tied = [replace(layer, shares=(layers[(i + 2) % 4].name,)) for i, layer in enumerate(layers)]
    names = [layer.name for layer in layers]
    first, second = plan.stages
    stages = (replace(first, layers=(names[0], names[2])), replace(second, layers=(names[1], names[3])))
    profiles = {"a": replace(profiles["a"], layers=tuple(tied))}
    assert time_balanced_plan(replace(plan, stages=stages), profiles) is None


def test_several_stages_per_device_have_no_balanced_plan_to_compare_with() -> None:
    plan, profiles = planned([1, 1, 1, 1], 2, schedules=("interleaved-1f1b",))
    assert time_balanced_plan(plan, profiles) is None


def test_a_gap_is_explained_by_what_the_bound_counts() -> None:
    plan, profiles = planned([3, 1, 4, 1, 5, 9, 2, 6], 3, schedules=("1f1b", "gpipe"))
    options = PlanOptions(minibatch_size=4)
    assert explain_gap(plan, profiles, options) == "Gap: none; the plan is proven optimal in the searched space."
    bound_ns = plan.certificate.lower_bound_ns // 2
    loose = replace(plan, certificate=certify(plan.prediction.step_ns, bound_ns, plan.certificate.space))
    gap = explain_gap(loose, profiles, options)
    assert f"the bound is {bound_ns / 1e6:,.1f} ms" in gap
    assert "may be too low or the plan too slow" in gap
    # The plan's own schedule and size are proven at once: the rest of this gap is a matter of the others.
    assert f"With {plan.schedule} and micro-batches of {plan.microbatch_size} alone, it leaves 0.0%." in gap
    assert explain(loose, profiles, options)[-1] == gap


def test_of_many_devices_a_longer_search_is_not_said_to_close_the_gap() -> None:
    plan, profiles = planned([3, 1, 4, 1, 5, 9, 2, 6] * 2, 36, schedules=("1f1b",))
    options = PlanOptions(minibatch_size=8, schedules=("1f1b",))
    loose = replace(plan, certificate=certify(plan.prediction.step_ns, 1, plan.certificate.space))
    assert "a longer time limit helps only if the search was ended before it was done" in explain_gap(
        loose, profiles, options
    )


def test_an_explanation_after_the_time_is_over_leaves_out_what_was_not_examined() -> None:
    plan, profiles = planned([3, 1, 4, 1], 2, replicas=False, schedules=("1f1b", "gpipe"))
    loose = replace(plan, certificate=certify(plan.prediction.step_ns, 1, plan.certificate.space))
    sentences = explain(loose, profiles, PlanOptions(minibatch_size=4), deadline=Deadline(0.0))
    about = dict(zip(TOPICS, sentences, strict=True))
    assert about["cuts"].startswith("Coarse-grained cuts: not known; no time was left")
    assert about["memory"].startswith("Memory fine-tuning: not known; no time was left")
    assert about["resources"].endswith("not known; no time was left for 4 of 4 speeds and links.")
    assert about["gap"].endswith(f"No time was left to search {plan.schedule} and micro-batches of 1 alone.")


def test_the_search_of_balanced_cuts_ends_with_its_deadline() -> None:
    plan, profiles = planned([3, 1, 4, 1], 2, replicas=False)
    with pytest.raises(OutOfTime):
        time_balanced_plan(plan, profiles, Deadline(0.0))


def test_balanced_cuts_do_not_look_at_stages_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, profiles = planned([1] * 24, 12, replicas=False)
    asked: list[tuple[int, int]] = []
    cost = Chain.cost

    def counted(chain: Chain, begin: int, end: int) -> StageCost:
        asked.append((begin, end))
        return cost(chain, begin, end)

    monkeypatch.setattr(Chain, "cost", counted)
    balanced = time_balanced_plan(plan, profiles)
    assert balanced is not None
    assert {len(stage.layers) for stage in balanced.stages} == {2}
    assert len(asked) < 1000  # of 1,696 stages that leave a layer or more to each of the stages before
