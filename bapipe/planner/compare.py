"""Compares schedules: the best plan of each, beside baselines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Alternative, Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.options import options_from
from bapipe.planner.baselines import BASELINES, Baselines, baseline_alternatives
from bapipe.planner.compute.deadline import Deadline, deadline_of
from bapipe.planner.inputs.clusters import as_cluster
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import Profiles, by_kind
from bapipe.planner.inputs.validation import microbatch_sizes, named_schedules
from bapipe.planner.plan import plan_once
from bapipe.planner.results.solution import sort_alternatives
from bapipe.printable import counted
from bapipe.tables import data_frame, rows_html

NO_TIME_LEFT = "the time limit was over before its turn: choose a longer `time_limit_s`"
INTERRUPTED = "the comparison was interrupted before its turn"

MIN_BASELINES_S, MAX_BASELINES_S, BASELINES_PART = 0.2, 2.0, 0.1
"""How long baselines, which need no search, are simulated where the time of the searches was over: this part of a given
time, within these seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Plans of several schedules, for the same mini-batch on the same devices.

    Attributes:
        plans: the best plan of each schedule, by its name.
        others: the alternatives of the best plan, with its baselines (one device, data parallelism, equal layers) under
            all schedules that are compared.
        failed: the reason why a schedule has no plan, or a baseline was left out, by its name.
        replicas: whether stages of the plans might have several devices.
    """

    plans: Mapping[str, Plan]
    others: tuple[Alternative, ...]
    failed: Mapping[str, str]
    replicas: bool = True

    def rows(self) -> list[dict[str, object]]:
        """Returns a row for each schedule and alternative, the fastest first, then one for each without a step time."""
        found: list[dict[str, object]] = []
        for name, plan in self.plans.items():
            row = {
                "strategy": name,
                "step_ns": plan.prediction.step_ns,
                "peak_bytes": plan.prediction.peak_bytes,
            }
            found.append({**row, "schedule": plan.schedule, "num_stages": len(plan.stages), "note": ""})
        for other in self.others:
            row = {"strategy": other.name, "step_ns": other.step_ns, "peak_bytes": other.peak_bytes}
            found.append({**row, "note": "" if other.feasible else other.why_not})
        found.sort(key=lambda row: cast(int, row["step_ns"]))
        for name, why in self.failed.items():
            found.append({"strategy": name, "note": why})
        return found

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with these rows."""
        return data_frame(self.rows())

    def _repr_html_(self) -> str:
        """Returns these rows as a table, for a notebook."""
        plan = next(iter(self.plans.values()))
        title = f"{plan.model}: mini-batches of {plan.minibatch_size} on {counted(len(plan.cluster.devices), 'device')}"
        title += "" if self.replicas else ", without replicas"
        return rows_html([title], self.rows())


def compare(
    profiles: Profiles,
    cluster: Cluster | int,
    options: PlanOptions | None = None,
    *,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
    **keywords: Any,
) -> Comparison:
    """Returns the best plan of each schedule in `options`, as `bapipe.plan` finds it for that one in part of the time.

    Args:
        profiles: one per kind of device.
        cluster: the devices and links; or a number of devices like the profiled one, with assumed links.
        options: as of `bapipe.plan`, or its fields as keyword arguments. Its `schedules` are compared: by default 1F1B
            and GPipe, of an empty list all with one stage per device; `all` is all that torch can run. With its
            `replicas`, stages of every schedule may have several devices. Its `time_limit_s` is the limit of all
            searches together: each has an equal share of what is left.
        deadline: when to end, in place of the one that `options.time_limit_s` says: from now on.
        progress: called with the name of the next schedule.

    Raises:
        BapipeError: there is no plan at all; the message is that of the last search.
        TypeError: an unknown option.
    """
    options, profiles = options_from(PlanOptions, options, keywords), by_kind(profiles)
    if options.goal is not None:
        raise BapipeError("a comparison is of the fastest plans: leave `goal` out")
    cluster = as_cluster(cluster, profiles)
    searches = {name: replace(options, schedules=[name]) for name in options.schedules or named_schedules(options)}
    plans: dict[str, Plan] = {}
    failed: dict[str, str] = {}
    deadline, baselines_s = deadline or deadline_of(options.time_limit_s), MAX_BASELINES_S
    whole = deadline
    if deadline.is_given and (left_s := deadline.remaining_s) is not None:
        baselines_s = max(MIN_BASELINES_S, min(MAX_BASELINES_S, BASELINES_PART * left_s))
        deadline = deadline.earlier(baselines_s)
    for number, (name, search) in enumerate(searches.items()):
        if deadline.is_over and plans:
            failed[name] = _why_left_out(deadline)
            continue
        if progress:
            progress(name)
        try:
            plans[name] = plan_once(profiles, cluster, search, deadline=deadline.share(len(searches) - number))
        except BapipeError as error:
            failed[name], last = str(error), error
    if not plans:
        raise last
    best = min(plans.values(), key=lambda plan: plan.prediction.step_ns)
    baselines = _baselines(best, profiles, options, Deadline(baselines_s) if deadline.is_over else whole)
    failed |= {name: _why_left_out(deadline) for name in baselines.left_out}
    return Comparison(plans=plans, others=baselines.alternatives, failed=failed, replicas=options.replicas)


def _why_left_out(deadline: Deadline) -> str:
    return INTERRUPTED if deadline.is_stopped else NO_TIME_LEFT


def _baselines(plan: Plan, profiles: ProfilesByKind, options: PlanOptions, deadline: Deadline) -> Baselines:
    """Returns the alternatives of a plan, with its baselines under the schedules of the options.

    Those of the plan itself are under its own schedule, or were left out as its search was ended.
    """
    sizes, schedules = microbatch_sizes(profiles, plan.cluster, options), named_schedules(options)
    limits = options.limits(plan.cluster)
    baselines = baseline_alternatives(plan, profiles, sizes, schedules, limits, deadline)
    others = (other for other in plan.alternatives if other.name not in BASELINES)
    return baselines._replace(alternatives=sort_alternatives((*others, *baselines.alternatives)))
