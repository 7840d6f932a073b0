"""Strategies side by side, the fastest first."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from rich.table import Table

from bapipe.formats.plan import Alternative, Plan
from bapipe.planner.inputs.options import SEARCH
from bapipe.printable import MAX_LINE, counted, printable
from bapipe.report.formatting import add_row, empty_table, rate
from bapipe.report.plans import replica_counts
from bapipe.units import number, percent_change, percent_up


def render_comparison(
    plans: Mapping[str, Plan], others: Sequence[Alternative], failed: Mapping[str, str], *, replicas: bool = True
) -> Iterator[Table | str]:
    """Yields a row for each strategy that has a plan or was simulated, then for each of the others why it has none.

    Args:
        replicas: whether stages of the plans might have several devices.
    """
    first = next(iter(plans.values()))
    memory = first.certificate.memory
    limit = "" if memory is msgspec.UNSET else f", {memory.in_words}"
    alone = "" if replicas else ", without replicas"
    sizes = f"mini-batches of {first.minibatch_size} on {counted(len(first.cluster.devices), 'device')}"
    yield f"{printable(first.model)}: {sizes}{alone}{limit}"
    columns = "ms per step>", "against the best>", "samples/s>", "bubble>", "peak MiB>", "gap at most>", "stages", "of"
    title = "strategies; gap: to a row's own bound; stages: devices of each, r: recomputes; of: micro-batches"
    table = empty_table(title, "strategy", *columns)
    fastest = min(plan.prediction.step_ns for plan in plans.values())

    def row(name: str, step_ns: int, peak_bytes: int, bubble: str, gap: str, stages: str, sizes: str) -> list[str]:
        against = percent_change(step_ns / fastest - 1) if step_ns != fastest > 0 else ""
        figures = number(step_ns / 1e6), against, rate(first.minibatch_size, step_ns)
        return [name, *figures, bubble, number(peak_bytes / 2**20), gap, stages, sizes]

    rows = [(other.step_ns, row(other.name, other.step_ns, other.peak_bytes, "", "", "", "")) for other in others]
    rows = [(step_ns, cells) for (step_ns, cells), other in zip(rows, others, strict=True) if other.feasible]
    for name, plan in plans.items():
        p = plan.prediction
        sizes = f"{plan.num_microbatches} x {plan.microbatch_size}"
        bubble, gap = f"{p.bubble:.1%}", percent_up(plan.certificate.gap)
        cells = row(name, p.step_ns, p.peak_bytes, bubble, gap, replica_counts(plan), sizes)
        rows.append((p.step_ns, cells))
    for _, cells in sorted(rows, key=lambda timed: timed[0]):
        add_row(table, *cells)
    yield table
    for name, plan in plans.items():
        if plan.schedule != name:
            yield f"{name}: with schedule {plan.schedule}; its gap is that of all plans with named schedules"
        elif name == SEARCH:
            yield f"{name}: its gap is that of all orders of the actions of its stages"
    for why in dict.fromkeys(failed.values()):
        names = ", ".join(name for name, own in failed.items() if own == why)
        yield f"{names}: {printable(why, MAX_LINE)}"
    yield from (f"{other.name}: {printable(other.why_not, MAX_LINE)}" for other in others if not other.feasible)


def comparison_json(
    plans: Mapping[str, Plan], others: Sequence[Alternative], failed: Mapping[str, str]
) -> dict[str, object]:
    """Returns what `bapipe compare --json` prints."""
    return {
        "plans": {
            name: {
                "step_ns": plan.prediction.step_ns,
                "peak_bytes": plan.prediction.peak_bytes,
                "bubble": plan.prediction.bubble,
                "gap": plan.certificate.gap,
                "space": plan.certificate.space,
                "schedule": plan.schedule,
                "microbatch_size": plan.microbatch_size,
                "stages": msgspec.to_builtins(plan.stages),
            }
            for name, plan in plans.items()
        },
        "others": msgspec.to_builtins(others),
        "failed": dict(failed),
    }
