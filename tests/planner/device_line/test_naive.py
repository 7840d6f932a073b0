"""The plans that everybody would try first."""

import pytest

from bapipe.planner.device_line.line import DeviceLine
from bapipe.planner.device_line.naive import naive_plans
from bapipe.planner.inputs.options import PlanOptions
from tests.builders import chain, devices


@pytest.mark.parametrize(
    ("num_stages", "replicas", "counts"), [(7, True, {1, 2, 5}), (7, False, {1}), (35, True, {1}), (41, True, set())]
)
def test_a_given_number_of_stages_has_plans_though_it_is_no_power_of_two(
    num_stages: int, replicas: bool, counts: set[int]
) -> None:
    profile, options = chain([1] * 50), PlanOptions(minibatch_size=64, num_stages=num_stages, replicas=replicas)
    found = naive_plans(DeviceLine({"a": profile}, devices(40), options), ["1f1b"], [1])
    assert {len(plan.counts) for _, plan in found} <= {num_stages}
    assert {plan.counts[0] for _, plan in found} == counts
    assert all(set(plan.counts) == {plan.counts[0]} for _, plan in found)


@pytest.mark.parametrize(("num_stages", "counts"), [(6, {(1, 1, 1)}), (14, {(1,) * 7}), (7, set()), (18, set())])
def test_a_given_number_of_stages_has_plans_with_two_stages_on_each_device(
    num_stages: int, counts: set[tuple[int, ...]]
) -> None:
    line = DeviceLine({"a": chain([1] * 50)}, devices(8), PlanOptions(minibatch_size=16, num_stages=num_stages))
    assert {plan.counts for _, plan in naive_plans(line, ["zb-v"], [1])} == counts


def test_as_many_replicas_as_micro_batches_are_among_them() -> None:
    found = naive_plans(DeviceLine({"a": chain([1])}, devices(40), PlanOptions(minibatch_size=37)), ["1f1b"], [1])
    assert (37,) in {plan.counts for _, plan in found}


@pytest.mark.parametrize(("num_devices", "expected"), [(77, {(34,), (34, 34), (19,) * 4}), (20, {(20,), (10, 10)})])
def test_stages_with_as_many_replicas_as_there_can_be_are_among_them(
    num_devices: int, expected: set[tuple[int, ...]]
) -> None:
    """Of devices that are no power of two, and more than micro-batches."""
    line = DeviceLine({"a": chain([1] * 9)}, devices(num_devices), PlanOptions(minibatch_size=34))
    assert expected <= {plan.counts for _, plan in naive_plans(line, ["1f1b"], [1])}
