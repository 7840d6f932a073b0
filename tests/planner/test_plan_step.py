"""What is proven of the best of several searches: with replicas, without them, and of an order of actions."""

from dataclasses import replace

import pytest
from msgspec import structs

from bapipe.errors import ConstraintsUnmet
from bapipe.planner.inputs.options import SEARCH, PlanOptions
from bapipe.planner.plan import plan
from bapipe.planner.plan_step import _joined, solve_partition
from bapipe.planner.results.searched_space import ActionOrderSpace
from bapipe.planner.search_request import SearchRequest
from tests.builders import chain, devices


@pytest.mark.parametrize("limit_s", [0.0, None])
@pytest.mark.parametrize(
    ("schedule", "num_stages", "possible"),
    [("zb-v", 7, "2, 4, 6"), ("zb-v", 8, "2, 4, 6"), ("1f1b", 5, "1, 2, 3"), ("interleaved-1f1b", 3, "2, 4, 6")],
)
def test_an_impossible_number_of_stages_is_said_whatever_the_time_limit(
    schedule: str, num_stages: int, possible: str, limit_s: float | None
) -> None:
    options = PlanOptions(minibatch_size=4, schedules=[schedule], num_stages=num_stages, time_limit_s=limit_s)
    text = f"^{num_stages} stages asked for; 3 devices, 9 layers and {schedule} allow {possible}$"
    with pytest.raises(ConstraintsUnmet, match=text):
        plan(chain([1] * 9), devices(3), options)


def test_a_possible_number_of_stages_has_a_plan_without_time_for_a_search() -> None:
    """Eight devices, of which three have two stages each."""
    options = PlanOptions(minibatch_size=4, schedules=["zb-v"], num_stages=6, time_limit_s=0.0)
    stages = plan(chain([1] * 9), devices(8), options).stages
    assert len(stages) == 6
    assert len({stage.devices for stage in stages}) == 3


@pytest.mark.parametrize("bound_ns", [3, 5])
def test_an_order_that_beats_plans_with_replicas_is_said_to_beat_what_is_proven_of_those(bound_ns: int) -> None:
    """The search for an order began with stages without replicas, of which more is proven than of those with."""
    request = SearchRequest(
        profiles={"a": chain([5, 1])}, cluster=devices(2), options=PlanOptions(minibatch_size=4, replicas=False)
    )
    start = solve_partition(request)
    named = replace(start, lower_bound_ns=bound_ns)
    space = ActionOrderSpace(
        schedule="1f1b", has_same_stages=True, num_other_partitions=0, named_bound_ns=7, stages_from=start.space
    )
    faster = structs.replace(start.prediction, step_ns=start.prediction.step_ns - 1)
    improved = replace(start, schedule=SEARCH, prediction=faster, space=space)
    found = _joined(named, start, improved)
    assert isinstance(found.space, ActionOrderSpace)
    assert found.space.named_bound_ns == bound_ns
    assert [other.name for other in found.alternatives] == [f"{named.schedule} with replicas"]
