"""Explores layouts x micro-batch sizes x schedules, and makes the best of them a plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import fingerprint
from bapipe.formats.plan import Plan, StagePlan, certify
from bapipe.formats.profile import ModelProfile
from bapipe.planner.action_order.improve_plan import SEARCH, improve_plan
from bapipe.planner.baselines import baseline_alternatives
from bapipe.planner.options import PlanOptions
from bapipe.planner.validation import check_inputs, microbatch_sizes, named_schedules
from bapipe.progress import SearchProgress

if TYPE_CHECKING:
    from bapipe.planner.branch_and_bound.problem import SearchResult
    from bapipe.planner.branch_and_bound.space import SearchSpace

WORK = 30_000
"""Partial plans opened before a search without a time limit stops: some seconds."""


def plan_step_time(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    stop: Callable[[], bool] | None = None,
    progress: SearchProgress | None = None,
) -> Plan:
    """Returns the fastest plan of the space that its certificate names, by an exact search.

    The space: the layers in the profile's order, cut anywhere into the stages of a schedule, each on some devices of
    the cluster; every measured or interpolated micro-batch size that divides the mini-batch.

    Args:
        profiles: one for each kind of device in the cluster.
        stop: ends the search with the best plan so far; without it, it ends after `WORK`.

    Raises:
        Infeasible: nothing fits; the message names the closest plan and what each device lacks.
        BapipeError: an unknown schedule, a device kind without a profile, profiles of different models, or sizes that
            do not divide.
    """
    if SEARCH in options.schedules:  # an order is searched for stages of one device
        options = replace(options, replicas=False)
    space, found = find_best_layout(profiles, cluster, options, stop=stop, progress=progress)
    plan = plan_of(profiles, found, options.minibatch_size, space)
    limits = options.limits(cluster)
    if SEARCH in options.schedules:
        plan = improve_plan(plan, profiles, limits, options.search_effort, may_move=not options.constraints)
    sizes = microbatch_sizes(profiles, cluster, options)
    others = (*plan.alternatives, *baseline_alternatives(plan, profiles, sizes, named_schedules(options), limits))
    return msgspec.structs.replace(plan, alternatives=tuple(sorted(others, key=lambda a: (not a.feasible, a.step_ns))))


def find_best_layout(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    stop: Callable[[], bool] | None = None,
    progress: SearchProgress | None = None,
) -> "tuple[str, SearchResult]":
    """Returns the space in words, and the best of it; see `plan_step_time`."""
    from bapipe.planner.branch_and_bound.infeasible import infeasible_error
    from bapipe.planner.branch_and_bound.search import best_first  # these load numpy
    from bapipe.planner.branch_and_bound.space import search_space
    from bapipe.planner.long_chain.bisection import is_long_chain, solve_long_chain

    check_inputs(profiles, cluster, options)
    space = search_space(profiles, cluster, options)
    limit = WORK if stop is None else 10**12
    stop = stop or (lambda: False)
    if is_long_chain(space.problems):
        found = solve_long_chain(space.problems, max_actions=400 * limit, stop=stop, progress=progress)
    else:
        found = best_first(space.problems, max_nodes=limit, stop=stop, progress=progress)
    if found is None:
        raise infeasible_error(profiles, cluster, options, space)
    return _words(profiles, cluster, options, space), found


def plan_of(profiles: Mapping[str, ModelProfile], found: "SearchResult", minibatch_size: int, space: str) -> Plan:
    """Returns what a search found as a plan, without alternatives."""
    problem, layout = found.problem, found.layout
    names = _names(profiles)
    table, _ = problem.compiled(layout.placements)
    first = profiles[problem.cluster.devices[table.devices[0][0]].kind]
    return Plan(
        model=first.model,
        factory=first.factory,
        arguments=first.arguments,
        profiles={kind: fingerprint(profile) for kind, profile in sorted(profiles.items())},
        cluster=problem.cluster,
        minibatch_size=minibatch_size,
        microbatch_size=problem.microbatch_size,
        num_microbatches=problem.num_microbatches,
        schedule=problem.schedule,
        stages=tuple(
            StagePlan(
                layers=tuple(names[start:stop]),
                devices=tuple(problem.cluster.devices[rank].name for rank in ranks),
                recompute=again,
            )
            for (start, stop), ranks, again in zip(pairwise(layout.cuts), table.devices, layout.recompute, strict=True)
        ),
        order=tuple(tuple(map(str, actions)) for actions in table.order),
        prediction=problem.simulate(layout).prediction(minibatch_size),
        certificate=certify(found.step_ns, found.lower_bound_ns, space),
        alternatives=(),
    )


def _words(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions, space: "SearchSpace") -> str:
    """The space, as a certificate says it."""
    sizes = ", ".join(map(str, microbatch_sizes(profiles, cluster, options)))
    rules = f"; where {options.in_words}" if options.constraints else ""
    return (
        f"every cut of {len(_names(profiles))} layers, in the profile's order, into "
        f"{_span(options.num_stages or space.stage_counts, 'stage')} on {_span(space.device_counts, 'device')} of "
        f"{len(cluster.devices)}{space.order}; micro-batches of {sizes}; "
        f"schedules {', '.join(named_schedules(options))}; {'any' if options.replicas else 'no'} replicas, "
        f"{'recomputation where a stage does not fit without' if options.recompute else 'no recomputation'}{rules}"
    )


def _names(profiles: Mapping[str, ModelProfile]) -> list[str]:
    """The layers' names, the same in every profile."""
    return [layer.name for layer in next(iter(profiles.values())).layers]


def _span(counts: Sequence[int] | int, noun: str) -> str:
    low, high = (counts, counts) if isinstance(counts, int) else (counts[0], counts[-1])
    return f"{low} {noun}{'s' if low > 1 else ''}" if low == high else f"{low} to {high} {noun}s"
