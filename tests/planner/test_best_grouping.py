"""The best plan over groupings of the devices."""

from dataclasses import replace

import pytest

from bapipe.errors import BapipeError, Infeasible
from bapipe.planner.best_grouping import best_grouping
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.inputs.device_grouping import Grouping
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan_step import solve_step_time
from bapipe.planner.results.solution import Rival, Solution
from bapipe.planner.search_request import SearchRequest
from tests.builders import chain, devices

GROUPINGS = [Grouping(name=name, profiles={"a": chain([1, 2])}, cluster=devices(2)) for name in ("singles", "merged")]
PROOF, NOT_FOUND = Infeasible("no plan fits"), Infeasible("none was found", is_proven=False)


@pytest.mark.parametrize(
    ("errors", "raised"),
    [((PROOF, OutOfTime("late")), "late"), ((PROOF, NOT_FOUND), "none was found"), ((PROOF, PROOF), "no plan fits")],
)
def test_what_proves_nothing_is_raised_before_a_proof_about_another_grouping(
    errors: tuple[BapipeError, ...], raised: str
) -> None:
    left = list(errors)

    def solve(grouping: Grouping, deadline: Deadline, rival: Rival | None) -> Solution:
        raise left.pop(0)

    with pytest.raises(BapipeError, match=raised):
        best_grouping(GROUPINGS, solve, UNLIMITED)


@pytest.mark.parametrize(("error", "is_optimal"), [(PROOF, True), (NOT_FOUND, False)])
def test_a_grouping_without_a_plan_leaves_a_proof_only_if_none_fits(error: Infeasible, is_optimal: bool) -> None:
    def solve(grouping: Grouping, deadline: Deadline, rival: Rival | None) -> Solution:
        if grouping.name == "merged":
            raise error
        options = PlanOptions(minibatch_size=4)
        return solve_step_time(SearchRequest(profiles=grouping.profiles, cluster=grouping.cluster, options=options))

    found = best_grouping(GROUPINGS, solve, UNLIMITED)
    assert (found.lower_bound_ns == found.prediction.step_ns) == is_optimal


@pytest.mark.parametrize("is_of_part", [False, True])
def test_a_bound_of_a_part_of_the_plans_of_a_grouping_is_not_one_of_all(is_of_part: bool) -> None:
    """Of the second grouping the search was cut off before it had looked at all schedules."""

    def solve(grouping: Grouping, deadline: Deadline, rival: Rival | None) -> Solution:
        options = PlanOptions(minibatch_size=4)
        found = solve_step_time(SearchRequest(profiles=grouping.profiles, cluster=grouping.cluster, options=options))
        return replace(found, asked_bound_ns=7) if is_of_part and rival is not None else found

    found = best_grouping(GROUPINGS, solve, UNLIMITED)
    assert found.lower_bound_ns == found.bound_of_all_ns == (7 if is_of_part else found.prediction.step_ns)
