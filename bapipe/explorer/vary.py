"""The best plan at each point of a grid of clusters and sizes: what more of a resource would be worth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import msgspec

from bapipe.errors import BapipeError
from bapipe.explorer.session import Session
from bapipe.explorer.state import State, cluster_of
from bapipe.explorer.sweep_processes import plan_chains
from bapipe.formats.plan import Plan
from bapipe.planner import nearby
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import check_schedules
from bapipe.planner.plan import plan_cached
from bapipe.planner.results.solution import preferred_of
from bapipe.printable import MAX_LINE, printable
from bapipe.report.plans import replica_counts

MAX_CHAIN = 10
"""Maximum number of neighbouring points in a chain, which is searched together; chains may run in processes."""

FIELDS = {
    "link": "bandwidth",
    "latency": "latency",
    "devices": "num_devices",
    "memory": "memory_bytes",
    "minibatch": "minibatch_size",
}
"""What can be varied, and the field of a page's state that holds it: factors of bandwidth and latency, a number of
devices, the bytes of memory of each of them, a number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The values of one of `FIELDS`, in the order in which they are tried."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The best plan at one point.

    Attributes:
        values: by the names of the axes.
        plan: None if there is none; `why_not` then says why.
        kind: stages, replicas, recomputation and schedule, in words.
        is_new_kind: whether the kind is not that of the point before, if there is one.
    """

    values: dict[str, float]
    plan: Plan | None
    why_not: str = ""
    kind: str = ""
    is_new_kind: bool = False

    @property
    def row(self) -> dict[str, object]:
        """The point as a row of a table: its values, then the figures of its plan."""
        if self.plan is None:
            return {**self.values, "why_not": self.why_not}
        prediction = self.plan.prediction
        return {
            **self.values,
            "step_ns": prediction.step_ns,
            "samples_per_s": prediction.samples_per_s,
            "peak_bytes": prediction.peak_bytes,
            "gap": self.plan.certificate.gap,
            "plan": self.kind,
            "microbatch_size": self.plan.microbatch_size,
            "is_new_kind": self.is_new_kind,
        }


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a sweep; `points` are those that were done by then."""

    def __init__(self, points: list[Point]) -> None:
        super().__init__()
        self.points = points


def vary(
    session: Session,
    axes: Sequence[Axis],
    schedules: Sequence[str],
    progress: Callable[[int, int], None],
    *,
    microbatch_size: int | None = None,
    exact: bool = False,
) -> list[Point]:
    """Returns the best plan at each point of the grid of the axes; the last axis changes fastest.

    Plans are kept in the cache, so a sweep that was interrupted goes on where it ended.

    Args:
        progress: called with (points done, number of points).
        microbatch_size: that of all plans; None to search it at each point.
        exact: search each point as `bapipe plan` does; else with `plans_nearby`, which ends near the lower bound.

    Raises:
        BapipeError: an unknown schedule; what is wrong with a single point is said in it.
        SweepInterrupted: Ctrl-C came before all points were done.
    """
    check_schedules(_options(session.first, schedules))
    grid = list(product(*(axis.values for axis in axes)))
    names = [axis.name for axis in axes]
    states: list[State | BapipeError] = []
    searched: list[nearby.Point] = []
    for values in grid:
        try:
            state = _on_axes(session.first, names, values)
            cluster = cluster_of(state, session.cluster)
        except BapipeError as error:
            states.append(error)
        else:
            states.append(state)
            searched.append(nearby.Point(cluster=cluster, options=_options(state, schedules, microbatch_size)))
    places = [i for i, state in enumerate(states) if isinstance(state, State)]
    chains = neighbours(axes, [grid[i] for i in places])
    plans = plan_chains(
        session.profiles,
        [[searched[k] for k in chain] for chain in chains],
        lambda done: progress(done, len(grid)),
        exact=exact,
    )
    found: list[Plan | str | None] = [str(state) for state in states]
    for chain, of_chain in zip(chains, plans, strict=True):
        for k, plan in zip(chain, of_chain, strict=True):
            found[places[k]] = plan
    if not exact:
        found = _with_plans_of_neighbours(session, grid, states, found)
    points = _points(names, grid, found)
    if len(points) < len(grid):
        raise SweepInterrupted(points)
    return points


def neighbours(axes: Sequence[Axis], grid: Sequence[tuple[float, ...]]) -> list[list[int]]:
    """Returns the points of a grid as numbers, in chains whose neighbours differ in the value of one axis.

    That is the axis with the most values, but for the number of devices: plans for other links or sizes are the better
    start of a search.
    """
    along = max(range(len(axes)), key=lambda i: (axes[i].name != "devices", len(axes[i].values)))
    lines: dict[tuple[float, ...], list[int]] = {}
    for number, values in enumerate(grid):
        lines.setdefault((*values[:along], *values[along + 1 :]), []).append(number)
    return [line[at : at + MAX_CHAIN] for line in lines.values() for at in range(0, len(line), MAX_CHAIN)]


def _on_axes(state: State, names: Sequence[str], values: Sequence[float]) -> State:
    for name, value in zip(names, values, strict=True):
        state = on_axis(state, name, value)
    return state


def _with_plans_of_neighbours(
    session: Session,
    grid: Sequence[tuple[float, ...]],
    states: Sequence[State | BapipeError],
    found: Sequence[Plan | str | None],
) -> list[Plan | str | None]:
    """Returns the plans, each replaced by that of the point before on an axis if that is faster here.

    So the plan for more devices is never slower only because its search ended early.
    """
    best, number = list(found), {values: i for i, values in enumerate(grid)}
    before = [dict(pairwise(sorted(set(of_axis), reverse=True))) for of_axis in zip(*grid, strict=True)]
    for i, values in sorted(enumerate(grid), key=lambda point: point[1]):
        for axis, value in enumerate(values):
            if value not in before[axis]:
                continue
            plan = best[number[(*values[:axis], before[axis][value], *values[axis + 1 :])]]
            state, here = states[i], best[i]
            if isinstance(plan, Plan) and isinstance(here, Plan) and isinstance(state, State):
                best[i] = preferred_of(here, session.try_plan(plan, state))
    return best


def _points(names: Sequence[str], grid: Sequence[tuple[float, ...]], found: Sequence[Plan | str | None]) -> list[Point]:
    """Returns the points that are done."""
    points, before = [], None
    for values, plan in zip(grid, found, strict=True):
        if plan is None:
            continue
        named = dict(zip(names, values, strict=True))
        if isinstance(plan, str):
            points.append(Point(values=named, plan=None, why_not=printable(plan, MAX_LINE)))
            continue
        kind = kind_of(plan)
        points.append(Point(values=named, plan=plan, kind=kind, is_new_kind=before not in (None, kind)))
        before = kind
    return points


def on_axis(state: State, name: str, value: float) -> State:
    """Returns a state with another value of one of `FIELDS`; factors and memory are those of the page's controls."""
    changes: dict[str, Any] = {FIELDS[name]: value}
    return msgspec.structs.replace(state, **changes)


def kind_of(plan: Plan) -> str:
    """Returns the devices of each stage and the schedule: what tells kinds of plans apart."""
    return f"{replica_counts(plan)}, {plan.schedule}"


def best_at(session: Session, state: State, schedules: Sequence[str], deadline: Deadline | None) -> Plan:
    """Returns the best plan for the cluster, the mini-batch and the pins of a state, from the cache if it is there."""
    profiles = tuple(session.profiles.values())
    return plan_cached(profiles, cluster_of(state, session.cluster), _options(state, schedules), deadline=deadline)


def _options(state: State, schedules: Sequence[str], microbatch_size: int | None = None) -> PlanOptions:
    return PlanOptions(
        minibatch_size=state.minibatch_size,
        microbatch_size=microbatch_size,
        schedules=schedules,
        constraints=state.constraints,
    )
