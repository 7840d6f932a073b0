"""Makes a solution of the stages of minimal load: their 1F1B order, the prediction, and the alternatives."""

from collections.abc import Sequence

from msgspec.structs import replace

from bapipe.formats.plan import THROUGHPUT, Alternative
from bapipe.formats.prediction import Prediction
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.results.searched_space import ThroughputSpace
from bapipe.planner.results.solution import Solution
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution
from bapipe.schedules.placement import place_schedule
from bapipe.schedules.table import Schedule
from bapipe.simulator.simulate import simulate_columns
from bapipe.simulator.stage_cost import build_stages


def throughput_solution(
    search: LoadSearch, best: LoadSolution, bound_ns: int, space: ThroughputSpace, alternatives: Sequence[Alternative]
) -> Solution:
    """Returns a solution with its simulated prediction, beside some alternatives."""
    table, prediction = simulate_solution(search, best)
    return Solution(
        profiles=search.profiles,
        cluster=search.cluster,
        objective=THROUGHPUT,
        minibatch_size=search.minibatch_size,
        microbatch_size=best.microbatch_size,
        schedule="1f1b",
        table=table,
        stages=_stage_plans(search, best),
        prediction=replace(prediction, load_ns=best.load_ns),
        lower_bound_ns=bound_ns,
        space=space,
        alternatives=tuple(alternatives),
    )


def _stage_plans(search: LoadSearch, solution: LoadSolution) -> tuple[StagePlan, ...]:
    devices = search.cluster.devices
    layers = search.profiles[devices[0].kind].layers
    return tuple(
        StagePlan(layers=tuple(layers[i].name for i in numbers), devices=tuple(devices[rank].name for rank in ranks))
        for numbers, ranks in solution.stages
    )


def simulate_solution(search: LoadSearch, solution: LoadSolution) -> tuple[Schedule, Prediction]:
    """Returns a solution's order, and what the simulator predicts for it."""
    # With as many micro-batches in flight as devices run a stage and those behind it.
    table = place_schedule(
        "1f1b",
        [ranks for _, ranks in solution.stages],
        search.minibatch_size // solution.microbatch_size,
        len(search.cluster.devices),
    )
    stages = _stage_plans(search, solution)
    costs = build_stages(stages, search.profiles, search.cluster, solution.microbatch_size)
    return table, simulate_columns(table, costs, search.cluster).prediction(search.minibatch_size)
