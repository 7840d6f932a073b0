"""Plans for the step time along the profile's order of the layers alone, without what `bapipe.plan` adds."""

from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import check_inputs
from bapipe.planner.plan_step import add_baselines, solve_step_time
from bapipe.planner.results.solution import Solution, make_plan
from bapipe.planner.search_request import SearchRequest
from bapipe.progress import SearchProgress


def plan_step_time(
    profiles: ProfilesByKind,
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
) -> Plan:
    """Returns the fastest plan along the profile's order of the layers; see `solve_step_time`."""
    return make_plan(step_time_solution(profiles, cluster, options, deadline=deadline, progress=progress))


def step_time_solution(
    profiles: ProfilesByKind,
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
) -> Solution:
    """Returns the result of that search, of which `plan_step_time` makes a plan."""
    check_inputs(profiles, cluster, options)
    request = SearchRequest(profiles=profiles, cluster=cluster, options=options, deadline=deadline, progress=progress)
    return add_baselines(solve_step_time(request), options, deadline)
