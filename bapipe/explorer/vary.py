"""The best plan at each point of a grid of clusters and sizes: what more of a resource would be worth."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from bapipe.errors import BapipeError
from bapipe.explorer.session import Session
from bapipe.explorer.state import State, cluster_of
from bapipe.formats.plan import Plan
from bapipe.planner.deadline import Deadline
from bapipe.planner.options import PlanOptions
from bapipe.planner.plan import plan_cached
from bapipe.printable import MAX_LINE, printable
from bapipe.report.plans import replica_counts

FIELDS = {
    "link": "bandwidth",
    "latency": "latency",
    "devices": "num_devices",
    "memory": "memory_bytes",
    "minibatch": "minibatch_size",
}
"""What can be varied, and the field of a page's state that holds it: factors of bandwidth and latency, a number of
devices, a limit in bytes for each of them, a number of samples."""


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
        is_new_kind: whether the kind is not that of the point before.
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
            "peak_bytes": max(rank.peak_bytes for rank in prediction.ranks),
            "gap": self.plan.certificate.gap,
            "plan": self.kind,
            "microbatch_size": self.plan.microbatch_size,
            "is_new_kind": self.is_new_kind,
        }


def vary(
    session: Session, axes: Sequence[Axis], schedules: Sequence[str], progress: Callable[[int, int], None]
) -> Iterator[Point]:
    """Yields the best plan at each point of the grid of the axes; the last axis changes fastest.

    Plans are kept in the cache, so a sweep that was interrupted goes on where it ended.

    Args:
        progress: called with (points done, number of points).
    """
    grid = list(product(*(axis.values for axis in axes)))
    before = None
    for done, values in enumerate(grid):
        progress(done, len(grid))
        named = dict(zip((axis.name for axis in axes), values, strict=True))
        try:
            state = session.first
            for name, value in named.items():
                state = on_axis(state, name, value)
            plan = best_at(session, state, schedules)
        except BapipeError as error:
            yield Point(values=named, plan=None, why_not=printable(str(error).replace("`", ""), MAX_LINE))
            continue
        kind = kind_of(plan)
        yield Point(values=named, plan=plan, kind=kind, is_new_kind=kind != before)
        before = kind


def on_axis(state: State, name: str, value: float) -> State:
    """Returns a state with another value of one of `FIELDS`; factors and limits are those of the page's controls."""
    changes: dict[str, Any] = {FIELDS[name]: value}
    return msgspec.structs.replace(state, **changes)


def kind_of(plan: Plan) -> str:
    """Returns the devices of each stage and the schedule: what tells kinds of plans apart."""
    return f"{replica_counts(plan)}, {plan.schedule}"


def best_at(session: Session, state: State, schedules: Sequence[str], deadline: Deadline | None = None) -> Plan:
    """Returns the best plan for the cluster, the mini-batch and the pins of a state, from the cache if it is there."""
    options = PlanOptions(minibatch_size=state.minibatch_size, schedules=schedules, constraints=state.constraints)
    profiles = tuple(session.profiles.values())
    return plan_cached(profiles, cluster_of(state, session.cluster), options, deadline=deadline)
