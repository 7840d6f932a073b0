"""What people look at: tables of plans and profiles, a text Gantt chart, a trace for Perfetto."""

from collections.abc import Callable, Iterator, Sequence

import msgspec
from rich.table import Table

from bapipe.cluster import Cluster
from bapipe.outcome import TrainResult
from bapipe.plan import Memory, Plan, Prediction
from bapipe.profile import ModelProfile
from bapipe.schedule import Phase
from bapipe.timeline import Timeline

FILL = {Phase.FORWARD: "░", Phase.BACKWARD: "▓", Phase.INPUT_GRAD: "▒", Phase.WEIGHT_GRAD: "█"}
UPDATE = "u"


def ms(time_ns: int) -> str:
    """Returns a time in milliseconds, three significant places below 100."""
    value = time_ns / 1e6
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def mib(num_bytes: int) -> str:
    """Returns a size in MiB."""
    value = num_bytes / 2**20
    return f"{value:,.0f} MiB" if value >= 100 else f"{value:.3g} MiB"


def plan_tables(plan: Plan) -> Iterator[Table | str]:
    """Yields what a plan decides, promises and was compared with."""
    p = plan.prediction
    yield (
        f"{plan.model}: {plan.schedule}, {len(plan.stages)} stages, {plan.num_microbatches} micro-batches of "
        f"{plan.microbatch_size}: {ms(p.step_ns)} a step, {p.samples_per_s:.4g} samples/s, bubble {p.bubble:.1%}"
    )
    yield stage_table(plan)
    yield _memory_table(plan.prediction)
    c = plan.certificate
    proof = "proven optimal" if c.proven_optimal else f"within {c.gap:.2%} of the lower bound {ms(c.lower_bound_ns)}"
    yield f"{proof} over {c.space}"
    if plan.alternatives:
        yield alternatives_table(plan)


def stage_table(plan: Plan) -> Table:
    """Returns a row for each stage: its devices, its layers, and how its device spends the step."""
    table = Table("stage", "devices", "layers", "from", "to", title="stages", title_justify="left")
    for s, stage in enumerate(plan.stages):
        table.add_row(str(s), ", ".join(stage.devices), str(len(stage.layers)), stage.layers[0], stage.layers[-1])
    return table


def _memory_table(prediction: Prediction) -> Table:
    names = Memory.__struct_fields__
    table = Table(
        "device", "busy", "sync", "idle", *names, "peak", title="predicted, for each device", title_justify="left"
    )
    for rank in prediction.ranks:
        parts = [mib(getattr(rank.memory, name)) for name in names]
        table.add_row(rank.device, ms(rank.busy_ns), ms(rank.sync_ns), ms(rank.idle_ns), *parts, mib(rank.peak_bytes))
    return table


def alternatives_table(plan: Plan) -> Table:
    """Returns the plan beside the other ways to train the same mini-batch."""
    table = Table("strategy", "step", "samples/s", "peak memory", "against the plan", title_justify="left")
    table.title = "alternatives"
    peak = max(rank.peak_bytes for rank in plan.prediction.ranks)
    table.add_row("this plan", ms(plan.prediction.step_ns), f"{plan.prediction.samples_per_s:.4g}", mib(peak), "")
    for other in plan.alternatives:
        rate = plan.minibatch_size * 1e9 / other.step_ns if other.step_ns else 0.0
        table.add_row(other.name, ms(other.step_ns), f"{rate:.4g}", mib(other.peak_bytes), other.why_not)
    return table


def profile_tables(profile: ModelProfile) -> Iterator[Table | str]:
    """Yields a profile's layers at its largest micro-batch size, and the totals at each size."""
    yield f"{profile.model} on {profile.device.name} ({profile.device.kind}), {profile.dtype}, {profile.optimizer}"
    largest = max(profile.measurements, key=lambda m: m.microbatch_size)
    table = Table("layer", "kind", "F", "I", "W", "update", "params", "stash", "output", title_justify="left")
    table.title = f"layers, micro-batches of {largest.microbatch_size}"
    for layer, m in zip(profile.layers, largest.layers, strict=True):
        table.add_row(
            layer.name,
            layer.kind,
            *(ms(t) for t in (m.forward_ns, m.input_grad_ns, m.weight_grad_ns, layer.update_ns)),
            *(mib(b) for b in (layer.param_bytes, m.stash_bytes, sum(m.output_bytes))),
        )
    yield table
    totals = Table("micro-batch", "F", "I", "W", "F+I+W a sample", "stash", title="whole model", title_justify="left")
    for measured in sorted(profile.measurements, key=lambda m: m.microbatch_size):
        f, i, w = (
            sum(getattr(x, k) for x in measured.layers) for k in ("forward_ns", "input_grad_ns", "weight_grad_ns")
        )
        stash = sum(x.stash_bytes for x in measured.layers)
        size = measured.microbatch_size
        totals.add_row(str(size), ms(f), ms(i), ms(w), ms((f + i + w) // size), mib(stash))
    yield totals


def cluster_tables(cluster: Cluster) -> Iterator[Table | str]:
    """Yields the devices and the links of a cluster."""
    table = Table("device", "host", "kind", "memory", "speed", "overlaps transfers", title_justify="left")
    for d in cluster.devices:
        table.add_row(
            d.name, d.host, d.kind, mib(d.memory_bytes), f"{d.speed:g}", "yes" if d.overlaps_transfers else "no"
        )
    yield table
    links = Table("link", "bandwidth", "latency", title_justify="left")
    for name, link in (("within a host", cluster.intra_host), ("between hosts", cluster.inter_host)):
        links.add_row(name, f"{link.bytes_per_s / 1e9:.3g} GB/s", f"{link.latency_ns / 1e3:.3g} µs")
    for own in cluster.links:
        rate = f"{own.bytes_per_s / 1e9:.3g} GB/s"
        links.add_row(f"{own.source} to {own.target}", rate, f"{own.latency_ns / 1e3:.3g} µs")
    yield links


def gantt(timeline: Timeline, width: int) -> str:
    """Returns a line of about `width` characters for each rank that works, to scale.

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
        line = [" "] * columns
        for span in timeline.spans:
            if span.rank == rank:
                paint(line, span.start_ns, span.end_ns, FILL[span.action.phase], str(span.action.microbatch))
        for update in timeline.updates:
            if update.rank == rank:
                paint(line, update.start_ns, update.end_ns, UPDATE, "")
        lines.append(f"{name:>{margin}} " + "".join(line).rstrip())
    legend = "░ forward  ▓ backward  ▒ input gradient  █ weight gradient  u update"
    return "\n".join([*lines, f"{'':>{margin}} 0 to {ms(timeline.step_ns)}: {legend}"])


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
        for span in timeline.spans:
            events.append(_slice(process, 2 * span.rank, str(span.action), span.start_ns, span.end_ns))
        for update in timeline.updates:
            events.append(_slice(process, 2 * update.rank, f"update {update.stage}", update.start_ns, update.end_ns))
        for t in timeline.transfers:
            label = f"{t.stage}{t.phase}{t.microbatch} to {timeline.devices[t.target]}"
            events.append(_slice(process, 2 * t.source + 1, label, t.start_ns, t.end_ns))
        for sync in timeline.syncs:
            events.append(
                _slice(process, 2 * len(timeline.devices) + sync.stage, "all-reduce", sync.start_ns, sync.end_ns)
            )
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n"


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": text}}


def _slice(process: int, thread: int, label: str, start_ns: int, end_ns: int) -> dict[str, object]:
    return {
        "ph": "X",
        "name": label,
        "pid": process,
        "tid": thread,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
    }


def outcome_tables(plan: Plan, result: TrainResult) -> Iterator[Table | str]:
    """Yields a run's losses, and its prediction beside what was measured."""
    figures = outcome_figures(plan, result)
    yield f"loss {result.losses[0]:.4f} at first, {result.losses[-1]:.4f} after {len(result.losses)} steps"
    table = Table("", "predicted", "measured", "prediction is", title="predicted and measured", title_justify="left")
    for name, (predicted, measured) in figures.items():
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


_SHOW: dict[str, Callable[[float], str]] = {
    "step": lambda value: ms(int(value)),
    "samples/s": lambda value: f"{value:.4g}",
    "peak": lambda value: mib(int(value)),
}


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
