"""The best plan over groupings of the devices."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bapipe.errors import BapipeError, Infeasible
from bapipe.planner.best_grouping import best_grouping
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.inputs.device_grouping import Grouping
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan_step import solve_step_time
from bapipe.planner.results.searched_space import GroupingsSpace
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
    to_raise = list(errors)

    def solve(grouping: Grouping, left: Sequence[Grouping], deadline: Deadline, rival: Rival | None) -> Solution:
        raise to_raise.pop(0)

    with pytest.raises(BapipeError, match=raised):
        best_grouping(GROUPINGS, solve, UNLIMITED)


@pytest.mark.parametrize(("error", "is_optimal"), [(PROOF, True), (NOT_FOUND, False)])
def test_a_grouping_without_a_plan_leaves_a_proof_only_if_none_fits(error: Infeasible, is_optimal: bool) -> None:
    def solve(grouping: Grouping, left: Sequence[Grouping], deadline: Deadline, rival: Rival | None) -> Solution:
        if grouping.name == "merged":
            raise error
        options = PlanOptions(minibatch_size=4)
        return solve_step_time(SearchRequest(profiles=grouping.profiles, cluster=grouping.cluster, options=options))

    found = best_grouping(GROUPINGS, solve, UNLIMITED)
    assert (found.lower_bound_ns == found.prediction.step_ns) == is_optimal


@pytest.mark.parametrize("is_of_part", [False, True])
def test_a_bound_of_a_part_of_the_plans_of_a_grouping_is_not_one_of_all(is_of_part: bool) -> None:
    """Of the second grouping the search was cut off before it had looked at all schedules."""

    def solve(grouping: Grouping, left: Sequence[Grouping], deadline: Deadline, rival: Rival | None) -> Solution:
        options = PlanOptions(minibatch_size=4)
        found = solve_step_time(SearchRequest(profiles=grouping.profiles, cluster=grouping.cluster, options=options))
        return replace(found, asked_bound_ns=7) if is_of_part and rival is not None else found

    found = best_grouping(GROUPINGS, solve, UNLIMITED)
    assert found.lower_bound_ns == found.bound_of_all_ns == (7 if is_of_part else found.prediction.step_ns)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_each_search_knows_what_is_left_and_ties_go_to_the_first_whatever_the_order(order: tuple[int, ...]) -> None:
    possible = [replace(GROUPINGS[0], name=name) for name in ("first", "second", "third")]
    options, asked = PlanOptions(minibatch_size=4), []

    def solve(grouping: Grouping, left: Sequence[Grouping], deadline: Deadline, rival: Rival | None) -> Solution:
        asked.append((grouping.name, [other.name for other in left]))
        return solve_step_time(SearchRequest(profiles=grouping.profiles, cluster=grouping.cluster, options=options))

    found = best_grouping(possible, solve, UNLIMITED, order)
    names = [possible[number].name for number in order]
    assert asked == [(name, names[i + 1 :]) for i, name in enumerate(names)]
    assert [other.name for other in found.alternatives[-2:]] == ["second", "third"]
    assert isinstance(found.space, GroupingsSpace)
    assert found.space.names == ("first", "second", "third")
