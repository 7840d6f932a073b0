"""Strategies side by side: what their steps consist of, how far each goes, and why some cannot be."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.planner.analysis.exchange import exchange_ns
from bapipe.planner.analysis.strategies import Strategy
from bapipe.planner.simulate import simulate
from bapipe.printable import MAX_LINE, counted, printable
from bapipe.report.formatting import add_row, empty_table
from bapipe.report.idle_time import idle_ns_by_cause
from bapipe.tables import rows_html
from bapipe.units import number


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step consists of, on average over the devices that have a stage: together the step.

    Attributes:
        compute_ns: F, B and updates, without what members of groups exchange.
        exchange_ns: what members exchange, and the time in which a device waits for a transfer or an all-reduce.
        waiting_ns: the rest.
    """

    compute_ns: int
    exchange_ns: int
    waiting_ns: int


def step_parts(strategy: Strategy, plan: Plan) -> StepParts:
    """Returns the parts of the step of a strategy's plan."""
    timeline = simulate(plan, strategy.profiles)
    idle = idle_ns_by_cause(timeline)
    ranks = sorted({span.rank for span in timeline.spans})
    per_microbatch = _exchange_per_microbatch(strategy, plan)
    compute_ns = exchanged_ns = 0
    for rank in ranks:
        device = plan.cluster.devices[rank]
        forwards = [span.action for span in timeline.spans_of(rank) if span.action.phase.value == "F"]
        in_group = sum(per_microbatch[action.stage, device.kind] for action in forwards)
        predicted = plan.prediction.ranks[rank]
        compute_ns += predicted.busy_ns - in_group
        exchanged_ns += in_group + idle[rank]["transfer"] + predicted.sync_ns
    compute, exchanged = (round(ns / len(ranks)) for ns in (compute_ns, exchanged_ns))
    waiting_ns = plan.prediction.step_ns - compute - exchanged
    return StepParts(compute_ns=compute, exchange_ns=exchanged, waiting_ns=max(0, waiting_ns))


def _exchange_per_microbatch(strategy: Strategy, plan: Plan) -> dict[tuple[int, str], int]:
    """How long the members of a group exchange data for a micro-batch, by stage and kind of its devices."""
    return {
        (s, kind): exchange_ns(stage, strategy.profiles[kind], plan.microbatch_size)
        for s, stage in enumerate(plan.stages)
        for kind in {plan.cluster.devices[plan.cluster.index[name]].kind for name in stage.devices}
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTable:
    """Strategies by name, for the same mini-batch on the same devices."""

    strategies: Mapping[str, Strategy]
    cluster: Cluster
    minibatch_size: int

    @property
    def title(self) -> str:
        profile = next(iter(next(iter(self.strategies.values())).profiles.values()))
        return (
            f"{profile.model}: mini-batches of {self.minibatch_size} on {counted(len(self.cluster.devices), 'device')}"
        )

    def rows(self) -> list[dict[str, object]]:
        """Returns a row for each strategy; those without a plan have no times, and the reason in `why_not`."""
        return [{"strategy": name, **_row(strategy)} for name, strategy in self.strategies.items()]

    def html(self, summary: Sequence[str] = ()) -> str:
        """Returns some sentences and the rows as a table of HTML."""
        return rows_html(summary, [{name: _text(value) for name, value in row.items()} for row in self.rows()])

    def _repr_html_(self) -> str:
        """Returns the strategies side by side, for a notebook."""
        return self.html([self.title])


def _text(value: object) -> object:
    return "" if value is None else value


def _row(strategy: Strategy) -> dict[str, object]:
    plan, limit = strategy.plan, strategy.limit
    parts = None if plan is None else step_parts(strategy, plan)
    return {
        "step_ns": None if plan is None else plan.prediction.step_ns,
        "compute_ns": None if parts is None else parts.compute_ns,
        "exchange_ns": None if parts is None else parts.exchange_ns,
        "waiting_ns": None if parts is None else parts.waiting_ns,
        "peak_bytes": None if plan is None else plan.prediction.peak_bytes,
        "plan": "" if plan is None else plan_in_words(plan, strategy),
        "most_devices": None if limit is None else limit.num_devices,
        "limit": "" if limit is None else limit.reason,
        "why_not": strategy.why_not,
    }


def plan_in_words(plan: Plan, strategy: Strategy) -> str:
    """Returns the stages with their numbers of replicas, the groups, the schedule and the micro-batches of a plan.

    One stage alone has no schedule to tell: it runs the B of each micro-batch after its F.
    """
    used = [plan.cluster.devices[plan.cluster.index[stage.devices[0]]] for stage in plan.stages]
    groups = dict.fromkeys(
        f"groups of {device.num_members} ({strategy.profiles[device.kind].device.split})"
        for device in used
        if device.num_members > 1
    )
    counts = [len(stage.devices) for stage in plan.stages]
    replicas = f" x {counts[0]}" if len(set(counts)) == 1 else f" on {'-'.join(map(str, counts))}"
    stages = f"{len(counts)} stage{'s' * (len(counts) > 1)}{replicas * (max(counts) > 1)}"
    schedule = [plan.schedule] * (len(counts) > 1)
    recomputes = ["recomputes"] * any(stage.recompute for stage in plan.stages)
    microbatches = f"{plan.num_microbatches} x {plan.microbatch_size} samples"
    return ", ".join([stages, *groups, *schedule, microbatches, *recomputes])


def render_strategies(table: StrategyTable) -> Iterator[Table | str]:
    """Yields the title, a row for each strategy that has a plan, how far each goes, and why the others have none."""
    yield printable(table.title, MAX_LINE)
    columns = "ms per step>", "compute>", "exchange>", "waiting>", "MiB>", "plan"
    steps = empty_table("milliseconds; the parts of a step: mean over its devices", "strategy", *columns)
    reach = empty_table("how far each goes", "strategy", "devices>", "limited by")
    rows = table.rows()
    for row in rows:
        if row["step_ns"] is not None:
            times = (number(_number(row[name]) / 1e6) for name in _TIMES)
            mib = number(_number(row["peak_bytes"]) / 2**20)
            add_row(steps, str(row["strategy"]), *times, mib, str(row["plan"]))
        if row["limit"]:
            add_row(reach, str(row["strategy"]), f"{row['most_devices']:,}", str(row["limit"]))
    yield steps
    yield reach
    yield from (f"{row['strategy']}: {printable(str(row['why_not']), MAX_LINE)}" for row in rows if row["why_not"])


_TIMES = "step_ns", "compute_ns", "exchange_ns", "waiting_ns"


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value
