"""The questions of a search for a goal: whether a plan on some devices, under some limits, is fast enough."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from bapipe.errors import ConstraintsUnmet, Infeasible
from bapipe.formats.certificate import Certificate
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.planner.compute.deadline import Deadline, OutOfTime
from bapipe.planner.inputs.device_grouping import groupings
from bapipe.planner.inputs.options import SEARCH, PlanOptions
from bapipe.planner.inputs.profiles import Profiles
from bapipe.planner.results.searched_space import counts_more_bytes, is_of_stages
from bapipe.planner.results.work_bound import step_bound_ns
from bapipe.progress import SearchProgress

NUM_SHARES = 3
"""Each search may take 1 / `NUM_SHARES` of the time that remains."""

ANY_NS = 2**62
"""More than any step takes."""

NO_PLAN_NS = ANY_NS + 1
"""In place of the lower bound of plans of which it is proven that there are none."""


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        bound_ns: on all plans that were asked for; the certificate's may be of a part of them.
    """

    plan: Plan
    bound_ns: int


Search = Callable[[Profiles, Cluster, PlanOptions, Deadline, SearchProgress], Found]
"""Searches for the shortest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan that is fast enough, or that there is none; neither if the search could not decide."""

    plan: Plan | None = None
    is_refuted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all searches of a goal have in common.

    Attributes:
        search: the one for the shortest step.
        limit_ns: a plan is fast enough if its step, or its load if that is the objective, takes no longer.
        space: what a proof must be about, in words, if some questions may be answered by searches of other spaces:
            under another memory limit other orders of the devices may be tried.
    """

    profiles: Profiles
    cluster: Cluster
    options: PlanOptions
    search: Search
    deadline: Deadline
    progress: SearchProgress
    limit_ns: int = ANY_NS
    space: str | None = None

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

        plan, bound_ns = self._found(share, end_when_fast_enough)
        if plan is None:
            return Answer(is_refuted=bound_ns > self.limit_ns)
        if plan.prediction.objective_ns <= self.limit_ns:
            return Answer(plan=plan)
        # The bound may be of the named schedules only, where orders of actions are searched, too; or leave plans out
        # that fit.
        is_of_all = SEARCH not in self.options.schedules and not counts_more_bytes(plan.certificate)
        is_of_all = is_of_all and self.space in (None, space_without_memory(plan.certificate))
        return Answer(is_refuted=is_of_all and bound_ns > self.limit_ns)

    def fastest(self, known: Plan) -> Plan:
        """Returns the fastest plan, at least as fast as a known one."""
        if self.deadline.is_over:
            return known
        try:
            found = self.search(self.profiles, self.cluster, self.options, self.deadline, self.progress).plan
        except (Infeasible, ConstraintsUnmet, OutOfTime):
            return known
        return found if found.prediction.objective_ns <= known.prediction.objective_ns else known

    def faster_than(self, known_ns: int) -> tuple[Plan | None, int]:
        """Returns the fastest plan, None if none is found, and a lower bound on all.

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

        plan, bound_ns = self._found(share, end_when_slower)
        if share.is_stopped and bound_ns < known_ns and not self.deadline.is_over:  # it was the bound of a part
            plan, bound_ns = self._found(self.deadline, self.progress)
        return plan, max(bound_ns, self.least_ns)

    def _found(self, deadline: Deadline, progress: SearchProgress) -> tuple[Plan | None, int]:
        """Returns the plan that a search finds, None if none, and the lower bound that it proves."""
        try:
            return self.search(self.profiles, self.cluster, self.options, deadline, progress)
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


def proven_ns(certificate: Certificate) -> int:
    """Returns the lower bound on all plans, 0 if it is about the stages of one plan."""
    return 0 if is_of_stages(certificate) else certificate.lower_bound_ns


def space_without_memory(certificate: Certificate) -> str:
    """Returns the space of a certificate in words, without the limit on memory."""
    memory = certificate.memory
    return certificate.space if memory is msgspec.UNSET else certificate.space.replace(f"; {memory.in_words}", "")
