"""The fastest layout of problems of every kind: each is given to the search for its kind."""

from collections.abc import Sequence
from dataclasses import replace

from bapipe.planner.branch_and_bound.problem import Problem, SearchResult
from bapipe.planner.branch_and_bound.search import best_first
from bapipe.planner.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.fixed_placements.cut_search import few_pipelines, search_cuts
from bapipe.planner.fixed_placements.improve import improve
from bapipe.planner.fixed_placements.search import has_fixed_placements, search_fixed_placements
from bapipe.planner.long_chain.bisection import is_long_chain, solve_long_chain
from bapipe.progress import SearchProgress

ACTIONS_PER_NODE = 400
"""Simulated actions of the searches for long chains and for fixed placements that take about as long as one node of the
branch and bound."""

MAX_CUT_NODES = 30_000
"""The budget of the search for fixed placements if another one follows it."""

MAX_PROOF_NODES = 2_000
"""The budget of the branch and bound that comes first, in which it solves small problems."""

MAX_IMPROVING_ACTIONS = 3_000_000
"""The budget of the local search that follows a search which leaves a gap."""

MAX_BRANCHED_BOUNDARIES = 100
"""Maximum number of boundaries with which fixed placements are searched by the branch and bound as well."""


def search_layouts(
    problems: Sequence[Problem],
    *,
    max_nodes: int,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
) -> SearchResult | None:
    """Returns the fastest layout found and a bound on all, None if nothing fits.

    Args:
        max_nodes: the budget of each search, in nodes of the branch and bound.
        deadline: ends the search with the best layout so far.

    Raises:
        OutOfTime: the deadline passed before any layout was found that fits.
    """
    fixed = [problem for problem in problems if problem.roots and has_fixed_placements(problem)]
    others = [problem for problem in problems if problem not in fixed]
    if not fixed:
        return _search(problems, max_nodes, deadline, progress, None)
    best: SearchResult | None = None
    is_branched = all(len(problem.cuts) <= MAX_BRANCHED_BOUNDARIES for problem in fixed)
    if is_branched:
        best = best_first(problems, max_nodes=min(max_nodes, MAX_PROOF_NODES), deadline=deadline, progress=progress)
        if best is not None and best.is_exhausted:
            return best
    is_followed = is_branched or others or few_pipelines(fixed)  # another search needs some of the time
    nodes = min(max_nodes, MAX_CUT_NODES) if is_followed else max_nodes
    raised, best = search_fixed_placements(
        fixed,
        max_actions=ACTIONS_PER_NODE * nodes,
        deadline=deadline.share(2) if others else deadline,
        progress=progress,
        incumbent=best,
    )
    if best is None or is_branched:
        # The first layout is still to be found, or a gap to be closed: from the bounds that are known now.
        raised_of = dict(zip(fixed, raised, strict=True))
        return _search([raised_of.get(each, each) for each in problems], max_nodes, deadline, progress, best)
    pipelines = few_pipelines(raised)
    if pipelines and best.lower_bound_ns < best.step_ns:
        best = search_cuts(
            pipelines,
            max_actions=ACTIONS_PER_NODE * max_nodes,
            deadline=deadline.share(2) if others else deadline,
            progress=progress,
            incumbent=best,
        )
        assert best is not None
    found = _search(others, max_nodes, deadline, progress, best) if others else None
    if found is None:
        return best
    fastest = min(best, found, key=lambda result: result.step_ns)
    return replace(fastest, lower_bound_ns=min(best.lower_bound_ns, found.lower_bound_ns))


def _search(
    problems: Sequence[Problem],
    max_nodes: int,
    deadline: Deadline,
    progress: SearchProgress | None,
    incumbent: SearchResult | None,
) -> SearchResult | None:
    """The searches for few pipelines and for long or short chains; what they leave open is held against naive plans."""
    max_actions = ACTIONS_PER_NODE * max_nodes
    known = _search_few_pipelines(problems, max_nodes, deadline, progress, incumbent)
    if known is not None and known.lower_bound_ns == known.step_ns:
        return known
    incumbent = known or incumbent
    found: SearchResult | None
    if is_long_chain(problems):
        try:
            found = solve_long_chain(problems, max_actions=max_actions, deadline=deadline, progress=progress)
        except OutOfTime as error:
            if incumbent is None:
                raise
            return replace(incumbent, lower_bound_ns=min(incumbent.step_ns, error.lower_bound_ns))
    else:
        found = best_first(problems, max_nodes=max_nodes, deadline=deadline, progress=progress, incumbent=incumbent)
    found = _best_of(found, known)
    if found is None or found.lower_bound_ns == found.step_ns:
        return found
    return improve(problems, found, max_actions=min(max_actions, MAX_IMPROVING_ACTIONS), deadline=deadline)


def _search_few_pipelines(
    problems: Sequence[Problem],
    max_nodes: int,
    deadline: Deadline,
    progress: SearchProgress | None,
    incumbent: SearchResult | None,
) -> SearchResult | None:
    """The branch and bound until it has solved small problems, then the search of cuts; None with many pipelines."""
    pipelines = few_pipelines(problems)
    if not pipelines:
        return None
    first: SearchResult | None = None
    if not is_long_chain(problems) and not all(has_fixed_placements(problem) for problem in problems):
        nodes = min(max_nodes, MAX_PROOF_NODES)
        first = best_first(problems, max_nodes=nodes, deadline=deadline, progress=progress, incumbent=incumbent)
        if first is not None and first.lower_bound_ns == first.step_ns:
            return first
    found = search_cuts(
        pipelines,
        max_actions=ACTIONS_PER_NODE * max_nodes,
        deadline=deadline.share(2),
        progress=progress,
        incumbent=first or incumbent,
    )
    return _best_of(found, first)


def _best_of(one: SearchResult | None, other: SearchResult | None) -> SearchResult | None:
    """Returns the faster of two results for the same problems, with the larger of their bounds."""
    if one is None or other is None:
        return one or other
    fastest = min(one, other, key=lambda result: result.step_ns)
    bound_ns = max(one.lower_bound_ns, other.lower_bound_ns)
    return replace(fastest, lower_bound_ns=min(bound_ns, fastest.step_ns))
