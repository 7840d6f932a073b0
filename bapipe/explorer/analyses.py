"""What the page computes in the background: the best plan, the Pareto front, what-if curves, an explanation."""

from collections.abc import Sequence

import msgspec

from bapipe.errors import BapipeError
from bapipe.explorer.answers import Json
from bapipe.explorer.background import Background, Job
from bapipe.explorer.session import Session
from bapipe.explorer.state import MAX_SHOWN_DEVICES, State, cluster_of
from bapipe.explorer.vary import FIELDS, best_at, kind_of, on_axis
from bapipe.formats.plan import Plan
from bapipe.planner.analysis.explain import TOPICS, explain
from bapipe.planner.analysis.pareto import pareto
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan import plan

FACTORS = 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0
"""Points of a curve over the bandwidth or the latency of the links."""

SHARES = 0.25, 0.375, 0.5, 0.625, 0.75, 1.0, 1.5
"""Points of a curve over the memory of the devices."""

MULTIPLES = 0.25, 0.5, 1.0, 2.0, 4.0
"""Points of a curve over the mini-batch."""


class Analyses:
    """The long computations of a page, one at a time. `kept` are their results, for the page as a file."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.background = Background()
        self.kept: dict[str, Json] = {}

    def best(self, state: State, schedules: tuple[str, ...], seconds: float) -> None:
        """Begins to search the best plan for a state's cluster and mini-batch."""

        def work(job: Job) -> Json:
            def progress(simulated: int, best_ns: int, bound_ns: int) -> None:
                job.report(simulated=simulated, best=best_ns, bound=bound_ns)

            cluster = cluster_of(state, self._session.cluster)
            options = self._options(state, schedules, job)
            found = plan(self._session.profiles, cluster, options, deadline=job.deadline, progress=progress)
            better = self._session.adopt(found, state)
            own = self._session.fitting_plan(state)
            # A search that was ended early may not have reached the plan of the page.
            if own is not None and not state.constraints and own.prediction.step_ns <= found.prediction.step_ns:
                better = state
            return {"state": msgspec.to_builtins(better)}

        self.background.begin("best", seconds, work)

    def front(self, state: State, schedules: tuple[str, ...], seconds: float) -> None:
        """Begins to search the front of step time, peak memory and number of devices."""

        def work(job: Job) -> Json:
            def progress(num_devices: int, limit_bytes: int) -> None:
                job.report(devices=num_devices, limit=limit_bytes)

            cluster = cluster_of(state, self._session.cluster)
            options = self._options(state, schedules, job)
            found = pareto(self._session.profiles, cluster, options, deadline=job.deadline, progress=progress)
            points = [
                {
                    **self._figures(point.plan, state),
                    "peak": point.peak_bytes,
                    "devices": point.num_devices,
                    "gap": point.gap,
                }
                for point in found
            ]
            self.kept["front"] = {"points": points}
            return {"points": points}

        self.background.begin("front", seconds, work)

    def sweep(self, axis: str, state: State, schedules: tuple[str, ...], seconds: float) -> None:
        """Begins to search the best plan at some values of an axis of `vary.FIELDS`; the rest is the state's."""
        values = axis_values(axis, state, self._session)

        def work(job: Job) -> Json:
            points: list[Json] = []
            last: Plan | None = None
            for done, value in enumerate(values):
                job.report(axis=axis, done=done, total=len(values), points=list(points))
                if job.deadline.is_over:
                    break
                there = on_axis(state, axis, value)
                own = self._session.fitting_plan(there) if axis != "devices" else None
                point, best = self._point(there, own, last, schedules, job, len(values) - done)
                is_new_kind = best is not None and last is not None and kind_of(best) != kind_of(last)
                same = own and own.prediction.step_ns
                points.append({"value": value, "same": same, **point, "isNewKind": is_new_kind})
                last = best or last
            found: Json = {"axis": axis, "points": points}
            self.kept[axis] = found
            return found

        self.background.begin("sweep", seconds, work)

    def _point(
        self,
        state: State,
        own: Plan | None,
        last: Plan | None,
        schedules: tuple[str, ...],
        job: Job,
        num_left: int,
    ) -> tuple[Json, Plan | None]:
        """Returns the figures of the best plan of a state's cluster, and that plan; why there is none, and None.

        Args:
            own: the plan of the page there.
            last: the best plan at the value before. A search that is ended early may not reach the two.
        """
        moved = None if last is None else self._session.try_plan(last, state)
        known = [plan for plan in (own, moved) if plan is not None and not state.constraints]
        try:
            best = best_at(self._session, state, schedules, job.deadline.share(num_left))
        except BapipeError as error:
            if not known:
                return {"whyNot": str(error).replace("`", "")}, None
            best = known[0]
        bound_ns = best.certificate.lower_bound_ns
        best = min((best, *known), key=lambda plan: plan.prediction.step_ns)
        gap = best.prediction.step_ns / max(best.certificate.lower_bound_ns, bound_ns, 1) - 1
        return {**self._figures(best, state), "gap": max(0.0, gap)}, best

    def _figures(self, found: Plan, state: State) -> Json:
        return {
            "step": found.prediction.step_ns,
            "rate": found.prediction.samples_per_s,
            "peak": found.prediction.peak_bytes,
            "kind": kind_of(found),
            "state": msgspec.to_builtins(self._session.adopt(found, state)),
        }

    def explain(self, state: State, schedules: tuple[str, ...], seconds: float) -> None:
        """Begins to explain a state's plan: sentences by topic."""

        def work(job: Job) -> Json:
            options = self._options(state, schedules, job)
            words = explain(self._session.plan(state), self._session.profiles, options, deadline=job.deadline)
            found: Json = {"why": dict(zip(TOPICS, words, strict=True)), "of": msgspec.to_builtins(state)}
            self.kept["explain"] = found
            return found

        self.background.begin("explain", seconds, work)

    def _options(self, state: State, schedules: tuple[str, ...], job: Job) -> PlanOptions:
        return PlanOptions(
            minibatch_size=state.minibatch_size,
            schedules=schedules,
            constraints=state.constraints,
            time_limit_s=job.deadline.remaining_s or 1.0,
        )


def axis_values(axis: str, state: State, session: Session) -> Sequence[float]:
    """Returns the values of a what-if curve around those of a state, ascending.

    Raises:
        BapipeError: no axis of that name.
    """
    if axis not in FIELDS:
        raise BapipeError(f"no axis '{axis}': want {', '.join(FIELDS)}")
    if axis in ("link", "latency"):
        now = state.bandwidth if axis == "link" else state.latency or 1.0
        return [now * factor for factor in FACTORS]
    if axis == "devices":
        now_devices = state.num_devices
        if now_devices <= 4:
            return list(range(1, 2 * now_devices + 1))
        counts = (max(1, round(now_devices * factor)) for factor in (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0))
        return sorted({min(count, MAX_SHOWN_DEVICES) for count in counts})
    if axis == "memory":
        most = max(device.memory_bytes for device in cluster_of(state, session.cluster).devices)
        return [max(1, round(most * share)) for share in SHARES]
    return sorted({max(1, round(state.minibatch_size * multiple)) for multiple in MULTIPLES})
