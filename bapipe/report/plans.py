"""A plan as tables: stages, memory, alternatives, and the Pareto front of plans."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
from rich.table import Table

from bapipe.formats.certificate import Certificate, ReachedGoal, is_of_changed_plan, outside_of, searched_space
from bapipe.formats.plan import Plan
from bapipe.formats.prediction import Memory
from bapipe.printable import MAX_LINE, MAX_NAMED, counted, printable
from bapipe.report.formatting import add_row, add_rows, empty_table, mib, ms, rate
from bapipe.simulator.timeline import Timeline
from bapipe.units import number, number_down, percent_up

MAX_GROUPS = 4
"""Groups whose members a plan's tables name: others of the cluster are alike."""

LEAST_BYTES_SAID = 2**10
"""A smaller bound on the memory that plans need is as good as none, and would be printed as 0.000 MiB."""


def render_plan(plan: Plan, timeline: Timeline | None = None) -> Iterator[Table | str]:
    """Yields the decisions of a plan, its prediction and certificate, and the alternatives it was compared with."""
    p = plan.prediction
    stages, batches = counted(len(plan.stages), "stage"), counted(plan.num_microbatches, "micro-batch")
    headline = f"{printable(plan.model)}: {stages}, {printable(plan.schedule)}, {batches} of {plan.microbatch_size}"
    if not plan.is_judged:
        yield f"{headline}\n{printable(plan.certificate.space, MAX_LINE)}"
        yield stage_table(plan)
        return
    samples_per_s = rate(plan.minibatch_size, p.step_ns)
    yield f"{headline}\n{ms(p.step_ns)} per step, {samples_per_s} samples/s, bubble {p.bubble:.1%}"
    if p.load_ns is not msgspec.UNSET:
        samples_per_s = rate(plan.minibatch_size, p.load_ns)
        yield (
            f"once the pipeline is full: {ms(p.load_ns)} of work per step on the busiest device, "
            f"{samples_per_s} samples/s"
        )
    yield stage_table(plan)
    if groups := groups_in_words(plan):
        yield printable(groups, MAX_LINE)
    yield memory_table(plan, timeline)
    if (num_others := len(plan.unused_devices) - MAX_NAMED) > 0:
        does = "has no stage and holds" if num_others == 1 else "have no stage and hold"
        yield f"{counted(num_others, 'more device')} {does} nothing"
    yield printable(proof(plan.certificate), MAX_LINE)
    if plan.cluster.assumed_links is not msgspec.UNSET and len(plan.cluster.devices) > 1:
        links = printable(plan.cluster.assumed_links)
        yield f"the links are assumed, not measured: {links}; `bapipe explore` shows what other links change"
    if plan.alternatives:
        yield alternatives_table(plan)


def groups_in_words(plan: Plan) -> str:
    """Returns the members of the first groups that have a stage; empty if all stages are on single devices."""
    used = set(plan.used_devices)
    named = [
        f"{device.name}: {', '.join(device.members)}"
        for device in plan.cluster.devices
        if device.name in used and device.members is not msgspec.UNSET
    ]
    more = f"; and {len(named) - MAX_GROUPS} more" if len(named) > MAX_GROUPS else ""
    return f"members of groups: {'; '.join(named[:MAX_GROUPS])}{more}" if named else ""


def proof(certificate: Certificate) -> str:
    """Returns in words how good a plan is proven to be."""
    # Spaces are part of plan files, whose texts stay as they are.
    space = certificate.space.replace("; orders were searched for 0 other cuts too", "")
    space = space.replace("for 1 other cuts too", "for 1 other cut too")
    certificate = msgspec.structs.replace(certificate, space=space)
    if certificate.goal is not msgspec.UNSET:
        return f"{_goal(certificate.goal)}; {_bound(certificate)}"
    return _bound(certificate)


def _goal(goal: ReachedGoal) -> str:
    """Returns what a plan has the least or the most of, and what is proven about it."""
    fast = "" if goal.limit_ns is msgspec.UNSET else f" at no more than {ms(goal.limit_ns)} per step"
    is_exact = goal.value == goal.bound
    if goal.quantity == "memory":
        found = f"least memory{fast}: {mib(goal.value)} a device"
        if is_exact:
            return f"{found} (proven: no plan of the searched space needs less)"
        if goal.bound < LEAST_BYTES_SAID:
            return f"{found} (it is not known whether one needs less)"
        return f"{found} (proven: none of the searched space needs less than {number_down(goal.bound / 2**20)} MiB)"
    if goal.quantity == "devices":
        among = f" among {goal.of}" if goal.of else ""
        found = f"fewest devices{fast}: {goal.value}"
        if is_exact:
            return f"{found} (proven: no plan of the searched space needs fewer{among})"
        if goal.bound <= 1:
            return f"{found} (it is not known whether one needs fewer)"
        return f"{found} (proven: none of the searched space needs fewer than {goal.bound}{among})"
    found = f"largest model{fast}: {goal.value} x {goal.of}"
    if goal.max_layers is not msgspec.UNSET:
        return f"{found} (no more were tried: models of more than {goal.max_layers:,} layers are not searched)"
    if not goal.bound:
        return f"{found} (it is not known whether more fit)"
    return f"{found} (proven: {goal.bound + 1} do not fit)"


def _bound(certificate: Certificate) -> str:
    """Returns in words what is proven about the step time."""
    if outside_of(certificate) is not None:
        return _bound_beside_pinned(certificate)
    if certificate.proven_optimal:
        if is_of_changed_plan(certificate):  # its changes may have led out of the space
            return f"no plan of this space is faster: {certificate.space}"
        return f"proven optimal over {certificate.space}"
    if not certificate.lower_bound_ns:
        return certificate.space
    changed = "; the plan itself need not be in that space" if is_of_changed_plan(certificate) else ""
    return f"{_within(certificate)}, over {certificate.space}{changed}"


def _bound_beside_pinned(certificate: Certificate) -> str:
    """Returns what is proven about the step of a plan that a user pinned, which may lie outside the searched space."""
    outside, space = outside_of(certificate), searched_space(certificate)
    if certificate.proven_optimal:
        return f"no plan of this space is faster than the pinned one{outside}: {space}"
    pinned = f"the pinned plan{outside}{',' * bool(outside)}"
    if not certificate.lower_bound_ns:
        return f"{pinned} is not bounded by this space: {space}"
    return f"{pinned} is {_within(certificate)}, of this space: {space}"


def _within(certificate: Certificate) -> str:
    at_least = number_down(certificate.lower_bound_ns / 1e6)
    return f"within {percent_up(certificate.gap)} of the lower bound, {at_least} ms"


def stage_table(plan: Plan) -> Table:
    """Returns a table with a row for each device of each stage: its layers, and how long it computes and waits."""
    table = empty_table("stages, times in ms", "stage", "layers", "first", "last", "device", "busy>", "sync>", "idle>")
    ranks, rows = {rank.device: rank for rank in plan.prediction.ranks}, []
    for s, stage in enumerate(plan.stages):
        for device in stage.devices:
            rank = ranks.get(device)
            times = [rank.busy_ns, rank.sync_ns, rank.idle_ns] if rank else []
            layers = (str(s), str(len(stage.layers)), stage.layers[0], stage.layers[-1])
            rows.append([*layers, device, *(number(t / 1e6) for t in times)])
    add_rows(table, rows)
    return table


def memory_table(plan: Plan, timeline: Timeline | None = None) -> Table:
    """Returns a table with a row per device: its memory at the peak, and with a timeline the action at the peak.

    Of the devices without a stage only the first few have a row. In place of all that a device has, the last figure is
    what a memory limit leaves of it, if there was one.
    """
    names, limit = Memory.__struct_fields__, plan.certificate.memory
    heads = "params>", "grads>", "optim>", "stash>", "work>", "buffers>", "total>", "limit>" if limit else "has>"
    table = empty_table("memory at the peak, in MiB", "device", *heads, *(["at"] if timeline else []))
    has = {
        device.name: limit.usable_bytes(device.memory_bytes) if limit else device.memory_bytes
        for device in plan.cluster.devices
    }
    left_out, rows = set(plan.unused_devices[MAX_NAMED:]), []
    for rank in plan.prediction.ranks:
        if rank.device in left_out:
            continue
        parts = [*(getattr(rank.memory, name) for name in names), rank.peak_bytes, has[rank.device]]
        peak = timeline.peak_action(timeline.devices.index(rank.device)) if timeline else None
        rows.append([rank.device, *(number(part / 2**20) for part in parts), *([str(peak or "")] if timeline else [])])
    add_rows(table, rows)
    return table


def alternatives_table(plan: Plan) -> Table:
    """Returns the plan compared with other strategies that train the same mini-batch."""
    table = empty_table("alternatives", "strategy", "ms per step>", "samples/s>", "peak MiB>", "against this plan")
    peak = plan.prediction.peak_bytes
    rows = [
        ("this plan", plan.prediction.step_ns, peak, ""),
        *((a.name, a.step_ns, a.peak_bytes, a.why_not) for a in plan.alternatives),
    ]
    for name, step_ns, peak_bytes, why in rows:
        samples_per_s = rate(plan.minibatch_size, step_ns)
        add_row(table, name, number(step_ns / 1e6), samples_per_s, number(peak_bytes / 2**20), why)
    return table


class FrontPoint(Protocol):
    """A plan on the Pareto front of step time, peak memory and number of devices."""

    @property
    def step_ns(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def gap(self) -> float: ...
    @property
    def plan(self) -> Plan: ...


def pareto_table(front: Sequence[FrontPoint]) -> Table:
    """Returns a table with a row for each plan on the front."""
    columns = (
        "ms per step>",
        "peak MiB>",
        "devices>",
        "gap at most>",
        "devices of each stage",
        "schedule",
        "micro-batches",
    )
    table = empty_table("no plan found is better in step time, peak memory and devices at once", *columns)
    for point in front:
        plan = point.plan
        figures = number(point.step_ns / 1e6), number(point.peak_bytes / 2**20), str(point.num_devices)
        sizes = f"{plan.num_microbatches} of {plan.microbatch_size}"
        add_row(table, *figures, percent_up(point.gap), replica_counts(plan), plan.schedule, sizes)
    return table


def replica_counts(plan: Plan) -> str:
    """Returns how many devices each stage has, with an r if it recomputes: `2r + 1 + 1`, `4 x 1`."""
    counts = [f"{len(stage.devices)}{'r' if stage.recompute else ''}" for stage in plan.stages]
    equal = len(set(counts)) == 1 and len(counts) >= 3
    return f"{len(counts)} x {counts[0]}" if equal else " + ".join(counts)


def plan_json(
    plan: Plan, words: Sequence[str], front: Sequence[FrontPoint], remarks: Sequence[str]
) -> dict[str, object]:
    """Returns what `bapipe plan --json` prints: the decisions and their prediction, explanation and Pareto front."""
    return {
        "model": plan.model,
        "schedule": plan.schedule,
        "microbatch_size": plan.microbatch_size,
        "num_microbatches": plan.num_microbatches,
        "stages": msgspec.to_builtins(plan.stages),
        "prediction": msgspec.to_builtins(plan.prediction),
        "certificate": msgspec.to_builtins(plan.certificate),
        "alternatives": msgspec.to_builtins(plan.alternatives),
        "remarks": list(remarks),
        "explanation": list(words),
        "pareto": [
            {
                "step_ns": point.step_ns,
                "peak_bytes": point.peak_bytes,
                "devices": point.num_devices,
                "gap": point.gap,
                "schedule": point.plan.schedule,
                "microbatch_size": point.plan.microbatch_size,
                "stages": msgspec.to_builtins(point.plan.stages),
            }
            for point in front
        ],
    }
