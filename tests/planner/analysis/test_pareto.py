"""The Pareto front holds plans of which none is better than another in step time, memory and devices at once."""

import pytest
from msgspec.structs import replace

import bapipe
from bapipe.errors import BapipeError, ConstraintsUnmet
from bapipe.formats.certificate import NOT_CERTIFIED
from bapipe.planner.analysis.pareto import pareto
from bapipe.planner.inputs.options import PlanOptions
from bapipe.simulator.simulate import simulate
from tests.builders import chain, devices
from tests.step_time import plan_step_time

PROFILES = {"a": chain([1, 2, 2, 1], param_bytes=10**6, stash_bytes=10**6)}
OPTIONS = PlanOptions(minibatch_size=4, schedules=("1f1b",))


def test_no_point_of_the_front_dominates_another() -> None:
    points = pareto(PROFILES, devices(3), OPTIONS)
    keys = [(point.step_ns, point.peak_bytes, point.num_devices) for point in points]
    assert len(keys) > 2
    assert keys == sorted(set(keys))
    for key in keys:
        assert not any(other != key and all(a <= b for a, b in zip(other, key, strict=True)) for other in keys)


def test_the_first_point_is_the_fastest_plan() -> None:
    first = pareto(PROFILES, devices(3), OPTIONS)[0]
    assert first.step_ns == plan_step_time(PROFILES, devices(3), OPTIONS).prediction.step_ns


def test_every_point_equals_the_simulation_of_its_plan() -> None:
    for point in pareto(PROFILES, devices(2), OPTIONS):
        timeline = simulate(point.plan, PROFILES)
        assert point.step_ns == timeline.step_ns
        assert point.peak_bytes == max(memory.total for memory in timeline.memory)
        assert point.num_devices == len({name for stage in point.plan.stages for name in stage.devices})
        assert 0 <= point.gap <= point.plan.certificate.gap


def test_progress_names_the_devices_and_the_memory_limit_of_each_search() -> None:
    searches: list[tuple[int, int]] = []
    pareto(PROFILES, devices(2), OPTIONS, progress=lambda count, limit: searches.append((count, limit)))
    limits = list(dict.fromkeys(limit for _, limit in searches))
    assert limits == sorted(limits, reverse=True)
    assert {count for count, _ in searches} == {1, 2}


def test_a_plan_of_another_search_is_compared() -> None:
    """One in which nothing takes time dominates all others on as many devices, and more."""
    made = bapipe.make(PROFILES["a"], devices(2), minibatch_size=4)
    fast = replace(made, prediction=replace(made.prediction, step_ns=1), certificate=NOT_CERTIFIED)
    points = pareto(PROFILES, devices(3), OPTIONS, known=fast)
    assert points[0].plan is fast
    assert all(point.num_devices < 2 or point.peak_bytes < points[0].peak_bytes for point in points[1:])
    assert all("schedules 1f1b" in point.plan.certificate.space for point in points[1:])


def test_only_steps_have_a_front() -> None:
    options = PlanOptions(minibatch_size=4, objective="throughput")
    with pytest.raises(BapipeError, match="the Pareto front is of steps: leave `objective` throughput out"):
        pareto({"a": chain([1, 2])}, devices(2), options)


def test_groups_have_points_and_count_as_their_members() -> None:
    """Groups of two take as long as a device, with a quarter of its memory for each member."""
    single = PROFILES["a"]
    (measured,) = single.measurements
    grouped = replace(
        single,
        device=replace(single.device, members=2, split="filter"),
        layers=tuple(replace(layer, param_bytes=layer.param_bytes // 4) for layer in single.layers),
        measurements=(
            replace(measured, layers=tuple(replace(m, stash_bytes=m.stash_bytes // 4) for m in measured.layers)),
        ),
    )
    of_groups = pareto([grouped], devices(4), OPTIONS)
    assert {point.num_devices for point in of_groups} == {2, 4}
    of_both = pareto([single, grouped], devices(4), OPTIONS)
    assert min(point.peak_bytes for point in of_both) == min(point.peak_bytes for point in of_groups)
    of_single = pareto([single], devices(4), OPTIONS)
    assert of_both[0] == of_single[0]
    keys = {(point.step_ns, point.peak_bytes, point.num_devices) for point in of_both}
    assert keys <= {(point.step_ns, point.peak_bytes, point.num_devices) for point in (*of_single, *of_groups)}


def test_a_grouping_that_cannot_keep_a_constraint_is_left_out() -> None:
    single = PROFILES["a"]
    grouped = replace(single, device=replace(single.device, members=2, split="filter"))
    options = PlanOptions(minibatch_size=4, schedules=("1f1b",), constraints=["l0 on d1"])
    points = pareto([single, grouped], devices(2), options)
    assert points == pareto([single], devices(2), options)
    with pytest.raises(ConstraintsUnmet, match="names some members of groups"):
        pareto([grouped], devices(2), options)
