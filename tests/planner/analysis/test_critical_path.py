"""The critical path is a chain of events without a pause from the start of a step to its end."""

from itertools import pairwise

from hypothesis import given

from bapipe.planner.analysis.critical_path import critical_path, time_shares
from bapipe.planner.inputs.options import PlanOptions
from bapipe.schedules import SCHEDULES
from bapipe.schedules.placement import distribute_replicas
from bapipe.simulator.simulate import simulate, simulate_schedule
from bapipe.simulator.timeline import Span, Transfer
from tests.builders import MS, chain, devices
from tests.random_pipelines import Pipeline
from tests.step_time import plan_step_time
from tests.strategies import examples, pipelines


def test_one_micro_batch_goes_through_every_stage_and_back() -> None:
    profiles = {"a": chain([1, 2], output_bytes=10**6)}
    options = PlanOptions(minibatch_size=1, num_stages=2, schedules=("1f1b",))
    timeline = simulate(plan_step_time(profiles, devices(2), options), profiles)
    path = critical_path(timeline)
    lasting = [event for event in path if isinstance(event, Span | Transfer)]
    assert [str(event.action) if isinstance(event, Span) else event.phase.name for event in lasting] == [
        "0F0", "FORWARD", "1F0", "1B0", "BACKWARD", "0B0",
    ]  # fmt: skip
    assert time_shares(timeline) == [
        ("compute of stage 1", 6 * MS),
        ("compute of stage 0", 3 * MS),
        ("the link from d0 to d1", MS),
        ("the link from d1 to d0", MS),
    ]


def test_an_all_reduce_waits_for_the_part_of_a_backward_that_fills_its_bucket() -> None:
    profiles = {"a": chain([1, 1, 8], param_bytes=30 * 2**20)}
    options = PlanOptions(minibatch_size=4, num_stages=1, schedules=("1f1b",))
    timeline = simulate(plan_step_time(profiles, devices(2, bytes_per_s=5 * 10**9), options), profiles)
    path = critical_path(timeline)
    *actions, cut, first, second, third = path
    assert [str(event.action) for event in [*actions, cut] if isinstance(event, Span)] == ["0F0", "0B0", "0F2", "0B2"]
    assert path[0].start_ns == 0
    assert (first, second, third) == timeline.syncs
    # Layer 2 has computed its gradients for 16 of the backward's 20 ms; they fill the first bucket.
    assert (cut.start_ns, cut.end_ns) == (40 * MS, 56 * MS)
    assert dict(time_shares(timeline))["compute of stage 0"] == 56 * MS


@given(pipelines((0, 1, 2), 3))
@examples(60)
def test_the_path_ends_with_the_step_and_has_no_pause(pipeline: Pipeline) -> None:
    table = distribute_replicas(SCHEDULES["1f1b"](3, 3), pipeline.devices, len(pipeline.cluster.devices))
    timeline = simulate_schedule(table, pipeline.stages, pipeline.cluster)
    path = critical_path(timeline)
    if timeline.step_ns == 0:  # of layers without cost
        assert path == ()
        return
    assert path[-1].end_ns == timeline.step_ns
    assert all(before.end_ns == after.start_ns for before, after in pairwise(path))
    assert all(event.end_ns > event.start_ns for event in path)
    assert path[0].start_ns == 0
    assert sum(time_ns for _, time_ns in time_shares(timeline)) == timeline.step_ns - path[0].start_ns
