"""Where the command line prints, and how it shows progress."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import bapipe
from bapipe import report
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.options import PlanOptions
from bapipe.planner.plan import pareto
from bapipe.progress import PartsProgress
from bapipe.runtime.train_result import Evaluation, StepReport, TrainResult

if TYPE_CHECKING:
    from bapipe.planner.analysis.pareto import ParetoPoint

_columns = os.environ.get("COLUMNS", "")
_width = int(_columns) if _columns.isdigit() and int(_columns) >= 40 else None
out = Console(width=_width or (None if sys.stdout.isatty() else 120), markup=False)
err = Console(stderr=True, markup=False)


def show_parts(parts: Iterable[Any]) -> None:
    """Prints tables and texts, an empty line after each."""
    for part in parts:
        out.print(part, "", highlight=False, sep="\n")


def note(text: str) -> None:
    """Prints a remark, beside what a command is for."""
    err.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def parts_bar(doing: str = "profiling") -> Iterator[PartsProgress]:
    """A bar for work in named parts."""
    columns = TextColumn(doing + " {task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)


@contextmanager
def planning_status() -> Iterator[Callable[[int, int, int], None]]:
    """Shows how far a search is: as a status on a terminal, else as a line every two seconds."""
    spoke_s = time.monotonic()
    with err.status("planning") as status:

        def progress(judged: int, best_ns: int, bound_ns: int) -> None:
            nonlocal spoke_s
            gap = best_ns / bound_ns - 1 if bound_ns else 0.0
            text = f"planning: {judged} plans judged, best {report.ms(best_ns)}, gap at most {gap:.2%}"
            status.update(text)
            if not err.is_terminal and time.monotonic() - spoke_s > 2:
                spoke_s = time.monotonic()
                note(text)

        yield progress


def pareto_front(profiles: dict[str, ModelProfile], where: Cluster, options: PlanOptions) -> "tuple[ParetoPoint, ...]":
    """Returns the front of plans, and says how far the search for it is."""
    with err.status("looking for the front") as status:

        def show(num_devices: int, limit_bytes: int) -> None:
            status.update(f"looking for the front: {num_devices} devices, {report.mib(limit_bytes)} each")

        return pareto(profiles, where, options, progress=show)


def time_left(step: int, steps: int, first: tuple[int, float], now_s: float) -> str:
    """Says how long the steps after `step` take at the pace since the first, where there is one."""
    if step == first[0] or step + 1 == steps:
        return ""
    left_s = (now_s - first[1]) / (step - first[0]) * (steps - step - 1)
    return f"  {timedelta(seconds=round(left_s))} left"


def train_with_bar(decided: Plan, steps: int, **options: Any) -> TrainResult:
    """Trains with a bar on a terminal, and with a line every two seconds elsewhere."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"starting {len(decided.stages)} stages", total=steps)
        spoke_s, first, latest = 0.0, None, ""

        def on_step(done: StepReport) -> None:
            nonlocal spoke_s, first
            rate, now_s = decided.minibatch_size * 1e9 / done.step_ns, time.monotonic()
            text = f"loss {done.loss:.4f}  {rate:.4g} samples/s  bubble {done.bubble:.0%}{latest}"
            first = first or (done.step, now_s)
            bar.update(task, completed=done.step + 1, description=text)
            if not err.is_terminal and (now_s - spoke_s > 2 or done.step + 1 == steps):
                spoke_s = now_s
                note(f"step {done.step + 1}/{steps}  {text}{time_left(done.step, steps, first, now_s)}")

        def on_evaluation(done: int, total: int, found: Evaluation | None) -> None:
            nonlocal latest
            if found is None:
                bar.update(task, description=f"evaluating: {done} of {total} samples")
            else:
                latest = f"  {report.evaluation_words(found)}"
                note(f"step {found.steps}/{steps}{latest}, {total} samples in {report.ms(found.elapsed_ns)}")

        try:
            return bapipe.run(decided, steps=steps, on_step=on_step, on_evaluation=on_evaluation, **options)
        except KeyboardInterrupt:
            bar.stop()
            note("interrupted: all ranks have ended")
            raise typer.Exit(130) from None
