"""What people look at: tables of plans and profiles, a text Gantt chart, a trace for Perfetto."""

from collections.abc import Iterator, Sequence
from math import floor, log10
from typing import Protocol

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from bapipe import shape
from bapipe.cluster import Cluster
from bapipe.outcome import TrainResult
from bapipe.plan import Memory, Plan
from bapipe.profile import ModelProfile
from bapipe.schedule import Phase
from bapipe.timeline import Timeline

FILL = {Phase.FORWARD: "░", Phase.BACKWARD: "▓", Phase.INPUT_GRAD: "▒", Phase.WEIGHT_GRAD: "█"}
NAME = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.INPUT_GRAD: "input gradient",
    Phase.WEIGHT_GRAD: "weight gradient",
}
UPDATE = "u"


def number(value: float) -> str:
    """Returns a figure with three significant digits, all those before the point, and none for zero."""
    if value == 0:
        return "0"
    digits = max(0, 2 - floor(log10(abs(value))))
    return f"{value:,.{digits}f}" if digits < 4 else "0.000"


def ms(time_ns: float) -> str:
    """Returns a time in milliseconds."""
    return f"{number(time_ns / 1e6)} ms"


def mib(num_bytes: float) -> str:
    """Returns a size in MiB."""
    return f"{number(num_bytes / 2**20)} MiB"


def plan_parts(plan: Plan, timeline: Timeline | None = None) -> Iterator[Table | str]:
    """Yields what a plan decides, promises and was compared with."""
    p = plan.prediction
    stages = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    yield (
        f"{plan.model}: {stages}, {plan.schedule}, {plan.num_microbatches} micro-batches of {plan.microbatch_size}\n"
        f"{ms(p.step_ns)} a step, {number(p.samples_per_s)} samples/s, bubble {p.bubble:.1%}"
    )
    if p.load_ns is not msgspec.UNSET:
        rate = number(plan.minibatch_size * 1e9 / p.load_ns) if p.load_ns else "0"
        yield f"once the pipeline is full: {ms(p.load_ns)} of work in a step on the busiest device, {rate} samples/s"
    yield stage_table(plan)
    yield memory_table(plan, timeline)
    c = plan.certificate
    proof = "proven optimal" if c.proven_optimal else f"within {c.gap:.2%} of the lower bound, {ms(c.lower_bound_ns)},"
    yield f"{proof} over {c.space}"
    if plan.alternatives:
        yield alternatives_table(plan)


def stage_table(plan: Plan) -> Table:
    """Returns a row for each stage: its layers, its devices, and how long these compute and wait."""
    table = empty_table("stages, times in ms", "stage", "layers", "first", "last", "device", "busy>", "sync>", "idle>")
    ranks = {rank.device: rank for rank in plan.prediction.ranks}
    for s, stage in enumerate(plan.stages):
        for device in stage.devices:
            rank = ranks.get(device)
            times = [rank.busy_ns, rank.sync_ns, rank.idle_ns] if rank else []
            layers = (str(s), str(len(stage.layers)), stage.layers[0], stage.layers[-1])
            table.add_row(*layers, device, *(number(t / 1e6) for t in times))
    return table


def memory_table(plan: Plan, timeline: Timeline | None = None) -> Table:
    """Returns a row for each device: what it holds at its peak, and during which action where a timeline tells."""
    names = Memory.__struct_fields__
    heads = "params>", "grads>", "optim>", "stash>", "work>", "buffers>", "total>", "has>"
    table = empty_table("memory at the peak, in MiB", "device", *heads, *(["at"] if timeline else []))
    has = {device.name: device.memory_bytes for device in plan.cluster.devices}
    for rank in plan.prediction.ranks:
        parts = [*(getattr(rank.memory, name) for name in names), rank.peak_bytes, has[rank.device]]
        peak = timeline.peak_action(timeline.devices.index(rank.device)) if timeline else None
        table.add_row(rank.device, *(number(part / 2**20) for part in parts), *([str(peak or "")] if timeline else []))
    return table


def alternatives_table(plan: Plan) -> Table:
    """Returns the plan beside the other ways to train the same mini-batch."""
    table = empty_table("alternatives", "strategy", "ms a step>", "samples/s>", "peak MiB>", "against this plan")
    peak = max((rank.peak_bytes for rank in plan.prediction.ranks), default=0)
    rows = [
        ("this plan", plan.prediction.step_ns, peak, ""),
        *((a.name, a.step_ns, a.peak_bytes, a.why_not) for a in plan.alternatives),
    ]
    for name, step_ns, peak_bytes, why in rows:
        rate = plan.minibatch_size * 1e9 / step_ns if step_ns else 0.0
        table.add_row(name, number(step_ns / 1e6), number(rate), number(peak_bytes / 2**20), why)
    return table


class FrontPoint(Protocol):
    """A plan on the front of step time, peak memory and number of devices."""

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
    """Returns a row for each plan on the front."""
    columns = (
        "ms a step>",
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
        widths = " + ".join(f"{len(stage.devices)}{'r' if stage.recompute else ''}" for stage in plan.stages)
        figures = number(point.step_ns / 1e6), number(point.peak_bytes / 2**20), str(point.num_devices)
        sizes = f"{plan.num_microbatches} of {plan.microbatch_size}"
        table.add_row(*figures, f"{point.gap:.2%}", widths, plan.schedule, sizes)
    return table


def plan_json(plan: Plan, words: Sequence[str], front: Sequence[FrontPoint]) -> dict[str, object]:
    """Returns what `bapipe plan --json` prints: prediction, certificate, alternatives, and what else was asked for."""
    return {
        "prediction": msgspec.to_builtins(plan.prediction),
        "certificate": msgspec.to_builtins(plan.certificate),
        "alternatives": msgspec.to_builtins(plan.alternatives),
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


def profile_parts(profile: ModelProfile) -> Iterator[Table | str]:
    """Yields a profile's layers at its largest micro-batch size, and the totals at each size."""
    yield f"{profile.model} on {profile.device.name} ({profile.device.kind}), {profile.dtype}, {profile.optimizer}"
    largest = max(profile.measurements, key=lambda m: m.microbatch_size)
    title = f"layers, micro-batches of {largest.microbatch_size}: times in ms, sizes in MiB"
    heads = "F>", "I>", "W>", "B>", "± %>", "update>", "params>", "stash>", "for W>", "output>"
    table = empty_table(title, "layer", "kind", *heads)
    for layer, m in zip(profile.layers, largest.layers, strict=True):
        times = (m.forward_ns, m.input_grad_ns, m.weight_grad_ns, m.whole_backward_ns)
        sizes = (layer.param_bytes, m.stash_bytes, m.left_by_input_grad_bytes, sum(m.output_bytes))
        row = (
            *(number(t / 1e6) for t in times),
            "" if m.spread is msgspec.UNSET else f"{100 * m.spread:.1f}",
            number(layer.update_ns / 1e6),
            *(number(b / 2**20) for b in sizes),
        )
        table.add_row(layer.name, layer.kind, *row)
    yield table
    columns = "F ms>", "I ms>", "W ms>", "B ms>", "F + B a sample>", "stash MiB>"
    totals = empty_table("the whole model", "micro-batch>", *columns)
    for measured in sorted(profile.measurements, key=lambda m: m.microbatch_size):
        f = sum(m.forward_ns for m in measured.layers)
        i = sum(m.input_grad_ns for m in measured.layers)
        w = sum(m.weight_grad_ns for m in measured.layers)
        b = sum(m.whole_backward_ns for m in measured.layers)
        stash = sum(m.stash_bytes for m in measured.layers)
        size = measured.microbatch_size
        totals.add_row(str(size), *(number(t / 1e6) for t in (f, i, w, b, (f + b) / size)), number(stash / 2**20))
    yield totals
    yield shape_table(profile)


def shape_table(profile: ModelProfile) -> Table:
    """What a cut after each layer would carry, beside the rails of the tensors that are alive."""
    size = max(m.microbatch_size for m in profile.measurements)
    found = shape.rows(profile)
    largest = max(row.cut_bytes for row in found)
    table = empty_table(
        f"shape, micro-batches of {size}", "", "layer", "F + B ms>", "a cut here carries MiB>", "", "tensors>"
    )
    for row in found:
        carried = number(row.cut_bytes / 2**20) if row.num_tensors else ""
        table.add_row(
            Text(row.rails, no_wrap=True),
            row.layer.name,
            number(row.forward_backward_ns / 1e6),
            carried,
            shape.bar(row.cut_bytes, largest),
            str(row.num_tensors or ""),
        )
    return table


def empty_table(title: str, *columns: str) -> Table:
    """An empty table; a column whose name ends in > is of numbers."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for column in columns:
        if column.endswith(">"):
            table.add_column(column[:-1], justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold", min_width=min(len(column), 6))
    return table


def cluster_parts(cluster: Cluster) -> Iterator[Table | str]:
    """Yields the devices and the links of a cluster."""
    table = empty_table("devices", "device", "host", "kind", "memory MiB>", "speed>", "computes while it transfers")
    for d in cluster.devices:
        overlaps = "yes" if d.overlaps_transfers else "no"
        overlaps += ", and F beside B" if d.side_by_side else ""
        table.add_row(d.name, d.host, d.kind, number(d.memory_bytes / 2**20), f"{d.speed:g}", overlaps)
    yield table
    links = empty_table("links", "link", "GB/s>", "latency µs>")
    named = [(f"{own.source} to {own.target}", own.bytes_per_s, own.latency_ns) for own in cluster.links]
    intra, inter = cluster.intra_host, cluster.inter_host
    named += [
        ("within a host", intra.bytes_per_s, intra.latency_ns),
        ("between hosts", inter.bytes_per_s, inter.latency_ns),
    ]
    for name, bytes_per_s, latency_ns in named:
        links.add_row(name, number(bytes_per_s / 1e9), number(latency_ns / 1e3))
    yield links
    if cluster.probe is not msgspec.UNSET:
        yield (
            f"both ways at once, {cluster.probe.both_ways:.0%} of a link's speed is left; computing takes "
            f"{cluster.probe.compute_slowdown:.0%} longer while a device receives"
        )
        sums = empty_table("all-reduce over all devices", "KB>", "ms>")
        for reduction in cluster.probe.all_reduce:
            sums.add_row(number(reduction.num_bytes / 1e3), number(reduction.ns / 1e6))
        yield sums


def gantt(timeline: Timeline, width: int) -> str:
    """Returns a line of about `width` characters for each rank that works, to scale.

    A rank that runs forward and backward side by side has a line for each.
    Every action begins with its micro-batch's number where there is room: ░ F, ▓ B, ▒ I, █ W, u update.
    """
    names = [name for rank, name in enumerate(timeline.devices) if any(s.rank == rank for s in timeline.spans)]
    margin = max(map(len, names), default=0)
    columns = max(width - margin - 1, 10)
    step_ns = max(timeline.step_ns, 1)

    def paint(line: list[str], start_ns: int, end_ns: int, fill: str, label: str) -> None:
        start, stop = start_ns * columns // step_ns, end_ns * columns // step_ns
        text = label if len(label) < stop - start or len(label) == stop - start == 1 else ""
        line[start:stop] = (text + fill * (stop - start - len(text)))[: stop - start]

    lines = []
    for rank, name in enumerate(timeline.devices):
        if name not in names:
            continue
        for place, spans in enumerate(timeline.lanes(rank)):
            line = [" "] * columns
            for span in spans:
                paint(line, span.start_ns, span.end_ns, FILL[span.action.phase], str(span.action.microbatch))
            for update in timeline.updates:
                if update.rank == rank:
                    paint(line, update.start_ns, update.end_ns, UPDATE, "")
            lines.append(f"{'' if place else name:>{margin}} " + "".join(line).rstrip())
    phases = {span.action.phase for span in timeline.spans}
    legend = "  ".join(f"{FILL[phase]} {NAME[phase]}" for phase in Phase if phase in phases)
    return "\n".join([*lines, f"{'':>{margin}} {legend}  {UPDATE} update  (0 to {ms(timeline.step_ns)})"])


def trace(timelines: Sequence[tuple[str, Timeline]]) -> bytes:
    """Returns named timelines as a Chrome trace (a JSON file that Perfetto and chrome://tracing open).

    One process for each timeline, one thread for each rank; transfers are on the sender, beside its actions.
    """
    events: list[dict[str, object]] = []
    for process, (title, timeline) in enumerate(timelines):
        events.append(_name("process_name", process, 0, title))
        for rank, device in enumerate(timeline.devices):
            events.append(_name("thread_name", process, 2 * rank, device))
            events.append(_name("thread_name", process, 2 * rank + 1, f"{device} sends"))
        for rank, device in enumerate(timeline.devices):
            first, *beside = timeline.lanes(rank)
            for spans, thread in [(first, 2 * rank), *((lane, 10_000 + rank) for lane in beside)]:
                events += [_slice(process, thread, str(s.action), s.start_ns, s.end_ns) for s in spans]
            events += [_name("thread_name", process, 10_000 + rank, f"{device} backwards") for _ in beside]
        for update in timeline.updates:
            events.append(_slice(process, 2 * update.rank, f"update {update.stage}", update.start_ns, update.end_ns))
        for t in timeline.transfers:
            label = f"{t.stage}{t.phase}{t.microbatch} to {timeline.devices[t.target]}"
            events.append(_slice(process, 2 * t.source + 1, label, t.start_ns, t.end_ns))
        for rank, held in enumerate(timeline.memory_over_time):
            own = [span for span in timeline.spans if span.rank == rank]
            events += [_counter(process, timeline.devices[rank], s.start_ns, m) for s, m in zip(own, held, strict=True)]
        for sync in timeline.syncs:
            events.append(
                _slice(process, 2 * len(timeline.devices) + sync.stage, "all-reduce", sync.start_ns, sync.end_ns)
            )
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n"


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": text}}


def _counter(process: int, device: str, at_ns: int, memory: Memory) -> dict[str, object]:
    parts = {name: getattr(memory, name) for name in Memory.__struct_fields__}
    return {"ph": "C", "name": f"memory {device}", "pid": process, "ts": at_ns / 1e3, "args": parts}


def _slice(process: int, thread: int, label: str, start_ns: int, end_ns: int) -> dict[str, object]:
    return {
        "ph": "X",
        "name": label,
        "pid": process,
        "tid": thread,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
    }


def outcome_parts(plan: Plan, result: TrainResult) -> Iterator[Table | str]:
    """Yields a run's losses, and its prediction beside what was measured."""
    yield f"loss {result.losses[0]:.4f} at first, {result.losses[-1]:.4f} after {len(result.losses)} steps"
    table = empty_table("predicted and measured", "", "predicted>", "measured>", "prediction off by>")
    for name, (predicted, measured) in outcome_figures(plan, result).items():
        show = _SHOW[name.split()[0]]
        off = f"{predicted / measured - 1:+.1%}" if measured else ""
        table.add_row(name, show(predicted), show(measured) if measured is not None else "unknown", off)
    yield table


def outcome_figures(plan: Plan, result: TrainResult) -> dict[str, tuple[float, float | None]]:
    """Returns (predicted, measured) of step time (ns), samples a second, and each device's peak memory (bytes)."""
    step_ns = result.typical_step_ns
    figures: dict[str, tuple[float, float | None]] = {
        "step": (plan.prediction.step_ns, step_ns),
        "samples/s": (plan.prediction.samples_per_s, plan.minibatch_size * 1e9 / step_ns),
    }
    predicted = {rank.device: rank.peak_bytes for rank in plan.prediction.ranks}
    for device, peak in zip(result.devices, result.peak_bytes, strict=True):
        figures[f"peak {device}"] = (predicted[device], peak)
    return figures


_SHOW = {"step": ms, "samples/s": number, "peak": mib}


def outcome_json(plan: Plan, result: TrainResult) -> dict[str, object]:
    """Returns what `bapipe run --json` prints: losses, times in ns, memory in bytes, order; predicted and measured."""
    return {
        "losses": result.losses,
        "step_ns": result.step_ns,
        "predicted_step_ns": plan.prediction.step_ns,
        "measured_step_ns": result.typical_step_ns,
        "ranks": [
            {
                "device": device,
                "predicted_peak_bytes": figures[0],
                "measured_peak_bytes": figures[1],
                "order": [str(action) for action in order],
            }
            for device, order in zip(result.devices, result.order, strict=True)
            for figures in [outcome_figures(plan, result)[f"peak {device}"]]
        ],
    }
