"""A question of a search for a goal: whether a plan on some devices, under some limits, is fast enough."""

from collections.abc import Callable
from dataclasses import dataclass

from bapipe.errors import ConstraintsUnmet, Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.inputs.device_grouping import groupings
from bapipe.planner.inputs.options import SEARCH, PlanOptions
from bapipe.planner.inputs.profiles import Profiles
from bapipe.planner.results.searched_space import SearchedSpace, is_of_action_orders, left_out, without_memory_limit
from bapipe.planner.results.solution import Solution
from bapipe.planner.results.work_bound import step_bound_ns
from bapipe.progress import SearchProgress

NUM_SHARES = 3
"""Each search may take 1 / `NUM_SHARES` of the time that remains."""

ANY_NS = 2**62
"""More than any step takes."""

NO_PLAN_NS = ANY_NS + 1
"""In place of the lower bound of plans of which it is proven that there are none."""

Search = Callable[[Profiles, Cluster, PlanOptions, Deadline, SearchProgress], Solution]
"""Searches for the shortest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A solution that is fast enough, or that there is none; neither if the search could not decide."""

    solution: Solution | None = None
    is_refuted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Whether there is a plan for some profiles, devices and options that is fast enough.

    Attributes:
        search: the one for the shortest step.
        limit_ns: a plan is fast enough if its step, or its load if that is the objective, takes no longer.
        space: what a proof must be about, but for its memory limit, if some questions may be answered by searches of
            other spaces: under another memory limit other orders of the devices may be tried.
    """

    profiles: Profiles
    cluster: Cluster
    options: PlanOptions
    search: Search
    deadline: Deadline
    progress: SearchProgress
    limit_ns: int = ANY_NS
    space: SearchedSpace | None = None

    def ask(self) -> Answer:
        """Returns whether a plan is fast enough; the search ends at the first one."""
        if self.deadline.is_over:
            return Answer()
        if self.least_ns > self.limit_ns:
            return Answer(is_refuted=True)
        share = self.deadline.share(NUM_SHARES)

        def end_when_fast_enough(num_simulated: int, best_ns: int, bound_ns: int) -> None:
            self.progress(num_simulated, best_ns, bound_ns)
            if best_ns <= self.limit_ns and self.options.objective == "step":
                share.stop()

        found, bound_ns = self._found(share, end_when_fast_enough)
        if found is None:
            return Answer(is_refuted=bound_ns > self.limit_ns)
        if found.objective_ns <= self.limit_ns:
            return Answer(solution=found)
        # The bound may be of the named schedules only, where orders of actions are searched, too; or leave plans out
        # that fit.
        is_of_all = SEARCH not in self.options.schedules and not left_out(found.space)
        is_of_all = is_of_all and (self.space is None or has_same_plans(self.space, found.space))
        return Answer(is_refuted=is_of_all and bound_ns > self.limit_ns)

    def fastest(self, known: Solution) -> Solution:
        """Returns the fastest solution, at least as fast as a known one."""
        if self.deadline.is_over:
            return known
        try:
            found = self.search(self.profiles, self.cluster, self.options, self.deadline, self.progress)
        except (Infeasible, ConstraintsUnmet, OutOfTime):
            return known
        return found if found.objective_ns <= known.objective_ns else known

    def faster_than(self, known_ns: int) -> tuple[Solution | None, int]:
        """Returns the fastest solution, None if none is found, and a lower bound on all.

        The search ends when its bound says that no plan is faster than a known one.
        """
        if self.deadline.is_over:
            return None, self.least_ns
        share = self.deadline.share(1)

        def end_when_slower(num_simulated: int, best_ns: int, bound_ns: int) -> None:
            self.progress(num_simulated, min(best_ns, known_ns), min(bound_ns, known_ns))
            # Where orders of actions are searched, too, the bound is of the named schedules only.
            if bound_ns >= known_ns and SEARCH not in self.options.schedules:
                share.stop()

        found, bound_ns = self._found(share, end_when_slower)
        if share.is_stopped and bound_ns < known_ns and not self.deadline.is_over:  # it was the bound of a part
            found, bound_ns = self._found(self.deadline, self.progress)
        return found, max(bound_ns, self.least_ns)

    def _found(self, deadline: Deadline, progress: SearchProgress) -> tuple[Solution | None, int]:
        """Returns what a search finds, None if nothing, and the lower bound that it proves of all plans asked for."""
        try:
            found = self.search(self.profiles, self.cluster, self.options, deadline, progress)
            return found, found.bound_of_all_ns
        except (Infeasible, ConstraintsUnmet) as error:
            return None, NO_PLAN_NS if error.is_proven else 0
        except OutOfTime as error:
            # Of the named schedules only, where orders of actions are searched, too.
            return None, 0 if SEARCH in self.options.schedules else error.lower_bound_ns

    @property
    def least_ns(self) -> int:
        """A time that no plan can beat; it needs no search. 0 if the objective is another one than the step."""
        if self.options.objective != "step":
            return 0
        possible = groupings(self.profiles, self.cluster, self.options.group)
        return min(step_bound_ns(grouping.profiles, grouping.cluster, self.options) for grouping in possible)


def proven_ns(solution: Solution) -> int:
    """Returns the lower bound on all plans of the space, 0 if it is about the stages of one plan."""
    return 0 if is_of_action_orders(solution.space) else solution.lower_bound_ns


def has_same_plans(space: SearchedSpace, other: SearchedSpace) -> bool:
    """Returns whether two spaces have the same plans, but for those that the memory limit of one rules out."""
    return without_memory_limit(space) == without_memory_limit(other)
