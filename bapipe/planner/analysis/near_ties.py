"""Plans that are hardly slower than a plan, and need much less memory or fewer devices."""

from dataclasses import dataclass

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.edit import edit
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import Profiles
from bapipe.schedules import ALL

MAX_SLOWDOWN = 0.02
"""How much slower than the plan a near-tie may be; one device outside the searched space may be as much faster."""

MAX_MEMORY = 0.8
"""Share of the plan's peak memory that a near-tie may need at most, unless it needs fewer devices."""

MAX_FORWARDS = 2**15
"""Stages times micro-batches up to which schedules are tried: each takes up to half a second there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearTie:
    """A plan that is hardly slower.

    Attributes:
        name: of the schedule that the same stages follow, or of the alternative of the plan.
        is_schedule: which of the two it is.
    """

    name: str
    is_schedule: bool
    step_ns: int
    peak_bytes: int


def near_ties(
    plan: Plan, profiles: Profiles, options: PlanOptions, deadline: Deadline = UNLIMITED
) -> tuple[NearTie, ...]:
    """Returns the near-tie with the least memory among the plan's stages in other schedules, and a single device.

    Args:
        options: the schedules to try, and the memory that devices may use.
        deadline: those for which no time is left are left out.
    """
    peak_bytes = plan.prediction.peak_bytes
    limit_ns = plan.prediction.step_ns * (1 + MAX_SLOWDOWN)
    others = [tie for tie in _rescheduled(plan, profiles, options, deadline) if tie.step_ns <= limit_ns]
    light = [tie for tie in others if tie.peak_bytes <= MAX_MEMORY * peak_bytes]
    alone = [
        NearTie(name=other.name, is_schedule=False, step_ns=other.step_ns, peak_bytes=other.peak_bytes)
        for other in plan.alternatives
        if other.name == "one-device" and other.feasible and len(plan.used_devices) > 1
        if abs(other.step_ns - plan.prediction.step_ns) <= MAX_SLOWDOWN * plan.prediction.step_ns
    ]
    return (*sorted(light, key=lambda tie: (tie.peak_bytes, tie.step_ns, tie.name))[:1], *alone)


def _rescheduled(plan: Plan, profiles: Profiles, options: PlanOptions, deadline: Deadline) -> list[NearTie]:
    found = []
    limits = dict(zip(plan.cluster.index, options.limits(plan.cluster), strict=True))
    for name in options.schedules:
        if name == plan.schedule or name not in ALL or plan.num_microbatches * len(plan.stages) > MAX_FORWARDS:
            continue
        if deadline.is_over:
            break
        try:
            other = edit(plan, profiles, schedule=name)
        except BapipeError:  # such as a schedule that places stages otherwise, or one that does not fit
            continue
        # `edit` knows the devices' memory, not what the options leave of it.
        fits = all(rank.peak_bytes <= limits[rank.device] for rank in other.prediction.ranks)
        if fits and [stage.devices for stage in other.stages] == [stage.devices for stage in plan.stages]:
            step_ns, peak_bytes = other.prediction.step_ns, other.prediction.peak_bytes
            found.append(NearTie(name=name, is_schedule=True, step_ns=step_ns, peak_bytes=peak_bytes))
    return found
