"""Comparisons of schedules with the baselines."""

import bapipe
from bapipe.formats.plan import Alternative
from tests.builders import chain, devices

SCHEDULES = ["gpipe", "1f1b", "zb-h1"]
PROFILE, CLUSTER = chain([1, 1, 1, 1], output_bytes=10**6), devices(2, bytes_per_s=10**8)
"""Each tensor takes 10 ms from stage to stage, as long as the work of one micro-batch is on one device."""


def equal_layers(others: tuple[Alternative, ...]) -> Alternative:
    return next(other for other in others if other.name == "equal-layers")


def test_baselines_have_the_best_of_all_schedules_as_in_a_plan() -> None:
    planned = bapipe.plan(PROFILE, CLUSTER, minibatch_size=8, schedules=SCHEDULES, replicas=False)
    assert len(planned.stages) == 1
    of_plan = equal_layers(planned.alternatives)
    for schedules in (SCHEDULES, SCHEDULES[::-1]):
        compared = bapipe.compare(PROFILE, CLUSTER, minibatch_size=8, schedules=schedules, replicas=False)
        assert equal_layers(compared.others).step_ns == of_plan.step_ns
    alone = {
        name: equal_layers(bapipe.compare(PROFILE, CLUSTER, minibatch_size=8, schedules=[name], replicas=False).others)
        for name in SCHEDULES
    }
    assert of_plan.step_ns == min(other.step_ns for other in alone.values())
    assert of_plan.step_ns < alone["gpipe"].step_ns
