"""The fastest layout of problems of every kind: each is given to the search for its kind."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from bapipe.planner.branch_and_bound.problem import Problem, SearchResult
from bapipe.planner.branch_and_bound.search import best_first
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, NothingFoundError, OutOfTime
from bapipe.planner.fixed_placements.cut_search import few_pipelines, search_cuts
from bapipe.planner.fixed_placements.improve import improve
from bapipe.planner.fixed_placements.search import has_fixed_placements, search_fixed_placements
from bapipe.planner.long_chain.bisection import BUDGET_ACTIONS_PER_NODE, is_long_chain, solve_long_chain
from bapipe.planner.stages.intervals import INF
from bapipe.planner.whole_progress import bounded_progress
from bapipe.progress import SearchProgress

MAX_CUT_NODES = 30_000
"""The budget of the search for fixed placements if another one follows it."""

ACTIONS_PER_ROOT = 200_000
"""How many simulated actions it may have for each choice of devices besides, up to as many again."""

MAX_PROOF_NODES = 2_000
"""The budget of the branch and bound that comes first, in which it solves small problems, ..."""

PROOF_PART = 8
"""... and the part of a time limit that it has at most."""

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
        NothingFoundError: none was found, and it is not proven that there is none.
    """
    searches = _Searches(max_nodes=max_nodes, deadline=deadline, progress=progress)
    fixed = [problem for problem in problems if problem.roots and has_fixed_placements(problem)]
    return searches.with_fixed_placements(problems, fixed) if fixed else searches.with_any_placements(problems, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Searches:
    """The searches for each kind of problem, with the budget and the limits that they have in common."""

    max_nodes: int
    deadline: Deadline
    progress: SearchProgress | None

    @property
    def max_actions(self) -> int:
        return BUDGET_ACTIONS_PER_NODE * self.max_nodes

    def with_fixed_placements(self, problems: Sequence[Problem], fixed: Sequence[Problem]) -> SearchResult | None:
        """Returns the fastest layout of all problems, of which some have fixed placements."""
        others = [problem for problem in problems if problem not in fixed]
        best: SearchResult | None = None
        is_branched = all(len(problem.cuts) <= MAX_BRANCHED_BOUNDARIES for problem in fixed)
        if is_branched:
            best = self._proof(problems, None)
            if best is not None and best.is_exhausted:
                return best
        share = self.deadline.share(2) if others else self.deadline
        others_ns = min((root.bound_ns for problem in others for root in problem.roots), default=INF)
        progress = self.progress and bounded_progress(self.progress, others_ns)
        is_followed = is_branched or others or few_pipelines(fixed)  # another search needs some of the time
        nodes = min(self.max_nodes, MAX_CUT_NODES) if is_followed else self.max_nodes
        max_actions = BUDGET_ACTIONS_PER_NODE * nodes
        max_actions += min(max_actions, ACTIONS_PER_ROOT * sum(len(problem.roots) for problem in fixed))
        raised, best = search_fixed_placements(
            fixed, max_actions=max_actions, deadline=share, progress=progress, incumbent=best
        )
        if best is None or is_branched:
            # The first layout is still to be found, or a gap to be closed: from the bounds that are known now.
            raised_of = dict(zip(fixed, raised, strict=True))
            return self.with_any_placements([raised_of.get(each, each) for each in problems], best)
        pipelines = few_pipelines(raised)
        if pipelines and best.lower_bound_ns < best.step_ns:
            share = self.deadline.share(2) if others else self.deadline
            best = search_cuts(
                pipelines, max_actions=self.max_actions, deadline=share, progress=progress, incumbent=best
            )
            assert best is not None
        of_others = replace(self, progress=self.progress and bounded_progress(self.progress, best.lower_bound_ns))
        found = of_others.with_any_placements(others, best) if others else None
        if found is None:
            return best
        fastest = min(best, found, key=lambda result: result.preference)
        return replace(fastest, lower_bound_ns=min(best.lower_bound_ns, found.lower_bound_ns))

    def with_any_placements(self, problems: Sequence[Problem], incumbent: SearchResult | None) -> SearchResult | None:
        """Returns the fastest layout by the searches for few pipelines and for long or short chains.

        What they leave open is compared with naive plans.
        """
        known = self._few_pipelines(problems, incumbent)
        if known is not None and known.lower_bound_ns == known.step_ns:
            return known
        incumbent = known or incumbent
        found: SearchResult | None
        if is_long_chain(problems):
            try:
                found = solve_long_chain(
                    problems, max_actions=self.max_actions, deadline=self.deadline, progress=self.progress
                )
            except OutOfTime as error:
                if incumbent is None:
                    raise
                return replace(incumbent, lower_bound_ns=min(incumbent.step_ns, error.lower_bound_ns))
        else:
            found = self._branch_and_bound(problems, incumbent, self.max_nodes)
        found = _best_of(found, known)
        if found is None or found.lower_bound_ns == found.step_ns:
            return found
        max_actions = min(self.max_actions, MAX_IMPROVING_ACTIONS)
        return improve(problems, found, max_actions=max_actions, deadline=self.deadline)

    def _few_pipelines(self, problems: Sequence[Problem], incumbent: SearchResult | None) -> SearchResult | None:
        """Returns the result of the search of cuts; None if there are many pipelines.

        Before it, the branch and bound solves small problems.
        """
        pipelines = few_pipelines(problems)
        if not pipelines:
            return None
        first: SearchResult | None = None
        if not is_long_chain(problems) and not all(has_fixed_placements(problem) for problem in problems):
            first = self._proof(problems, incumbent)
            if first is not None and first.lower_bound_ns == first.step_ns:
                return first
        found = search_cuts(
            pipelines,
            max_actions=self.max_actions,
            deadline=self.deadline.share(2),
            progress=self.progress,
            incumbent=first or incumbent,
        )
        return _best_of(found, first)

    def _proof(self, problems: Sequence[Problem], incumbent: SearchResult | None) -> SearchResult | None:
        """Returns the result of a short branch and bound, which solves small problems; None if it finds nothing."""
        in_part = replace(self, deadline=self.deadline.share_of_limit(PROOF_PART))
        with suppress(NothingFoundError, OutOfTime):
            return in_part._branch_and_bound(problems, incumbent, min(self.max_nodes, MAX_PROOF_NODES))
        return None

    def _branch_and_bound(
        self, problems: Sequence[Problem], incumbent: SearchResult | None, max_nodes: int
    ) -> SearchResult | None:
        return best_first(
            problems, max_nodes=max_nodes, deadline=self.deadline, progress=self.progress, incumbent=incumbent
        )


def _best_of(one: SearchResult | None, other: SearchResult | None) -> SearchResult | None:
    """Returns the faster of two results for the same problems, with the larger of their bounds."""
    if one is None or other is None:
        return one or other
    fastest = min(one, other, key=lambda result: result.preference)
    bound_ns = max(one.lower_bound_ns, other.lower_bound_ns)
    return replace(fastest, lower_bound_ns=min(bound_ns, fastest.step_ns))
