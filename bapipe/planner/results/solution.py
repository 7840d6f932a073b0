"""The result of a search, and the one place where a plan is put together, of such a result or of a user's decisions.

Every search returns a `Solution`. The best one over linearizations and device groupings is chosen, and alternatives
are added; `make_plan` then makes the `Plan`, once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from bapipe.formats.certificate import certify
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import fingerprint
from bapipe.formats.plan import THROUGHPUT, Alternative, Objective, Plan, with_certificate
from bapipe.formats.prediction import Prediction
from bapipe.formats.profile import ProfilesByKind, common_settings
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.results.preference import Preference
from bapipe.planner.results.searched_space import SearchedSpace, in_words, memory_limit
from bapipe.schedules.table import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The best plan for another grouping of the devices: what a search need not beat, nor prove more than.

    Attributes:
        objective_ns: its value of the objective.
        lower_bound_ns: what is proven of all plans for the groupings searched so far.
    """

    objective_ns: int
    lower_bound_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best stages and order of a space, with a lower bound on all of that space.

    Attributes:
        schedule: the name of the schedule of which `table` is the order.
        prediction: of one step, by the simulator.
        lower_bound_ns: on the objective: the step time, or the largest load of a device.
        space: the plans for which `lower_bound_ns` holds.
        asked_bound_ns: what holds for all plans that were asked for, if `space` is only a part of them: the search was
            cut off before it had looked at other schedules or orders of devices, or it searched orders of actions.
    """

    profiles: ProfilesByKind
    cluster: Cluster
    objective: Objective = "step"
    minibatch_size: int
    microbatch_size: int
    schedule: str
    table: Schedule
    stages: tuple[StagePlan, ...]
    prediction: Prediction
    lower_bound_ns: int
    space: SearchedSpace
    asked_bound_ns: int | None = None
    alternatives: tuple[Alternative, ...] = ()

    @property
    def bound_of_all_ns(self) -> int:
        """A lower bound on all plans that were asked for."""
        return self.lower_bound_ns if self.asked_bound_ns is None else self.asked_bound_ns

    @property
    def objective_ns(self) -> int:
        """The value of the objective: the step time, or the largest load of a device."""
        return self.prediction.objective_ns

    @property
    def used_ranks(self) -> tuple[int, ...]:
        """The ranks of the devices that have a stage, ascending."""
        return tuple(sorted({rank for ranks in self.table.devices for rank in ranks}))

    @property
    def preference(self) -> Preference:
        """Which of several solutions is preferred."""
        return preference_of(self.objective_ns, self.prediction.peak_bytes, self.stages)


def make_plan(solution: Solution) -> Plan:
    """Returns the plan of a solution, with its certificate.

    Raises:
        BapipeError: the profiles were measured with different settings.
    """
    plan = uncertified_plan(
        solution.profiles,
        solution.cluster,
        objective=solution.objective,
        minibatch_size=solution.minibatch_size,
        microbatch_size=solution.microbatch_size,
        schedule=solution.schedule,
        table=solution.table,
        stages=solution.stages,
        prediction=solution.prediction,
        alternatives=solution.alternatives,
    )
    space = solution.space
    certificate = certify(solution.objective_ns, solution.lower_bound_ns, in_words(space), memory_limit(space))
    return with_certificate(plan, certificate)


def uncertified_plan(
    profiles: ProfilesByKind,
    cluster: Cluster,
    *,
    objective: Objective = "step",
    minibatch_size: int,
    microbatch_size: int,
    schedule: str,
    table: Schedule,
    stages: tuple[StagePlan, ...],
    prediction: Prediction,
    alternatives: tuple[Alternative, ...] = (),
) -> Plan:
    """Returns the plan of some stages and an order of their actions, without a certificate.

    Raises:
        BapipeError: the profiles were measured with different settings.
    """
    profile = profiles[cluster.devices[cluster.index[stages[0].devices[0]]].kind]  # all are of one model
    return Plan(
        model=profile.model,
        factory=profile.factory,
        arguments=profile.arguments,
        profiles={kind: fingerprint(of_kind) for kind, of_kind in sorted(profiles.items())},
        settings=common_settings(profiles.values()),
        cluster=cluster,
        objective=THROUGHPUT if objective == THROUGHPUT else msgspec.UNSET,
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        num_microbatches=table.num_microbatches,
        schedule=schedule,
        stages=stages,
        order=tuple(tuple(map(str, actions)) for actions in table.order),
        prediction=prediction,
        alternatives=alternatives,
    )


def sort_alternatives(alternatives: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Returns the alternatives that fit first, then the others; the fastest first in each."""
    return tuple(sorted(alternatives, key=lambda a: (not a.feasible, a.step_ns)))


def preference(plan: Plan) -> Preference:
    """Returns which of several plans is preferred."""
    return preference_of(plan.prediction.objective_ns, plan.prediction.peak_bytes, plan.stages)


def preference_of(objective_ns: int, peak_bytes: int, stages: Sequence[StagePlan]) -> Preference:
    """Returns which of several plans with some stages is preferred; `peak_bytes` is the largest of a device."""
    used = {name for stage in stages for name in stage.devices}
    return Preference(objective_ns, peak_bytes, len(used), len(stages))


def preferred_of(plan: Plan, other: Plan | None) -> Plan:
    """Returns the preferred one of two plans of one space, with the bound of the first."""
    if other is None or preference(other) >= preference(plan):
        return plan
    step_ns, proven = other.prediction.step_ns, plan.certificate
    bound_ns = min(step_ns, proven.lower_bound_ns)
    return with_certificate(other, certify(step_ns, bound_ns, proven.space, proven.memory))
