"""The tables of predicted and measured steps."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.clusters.deepspeed import Step
from benchmarks.clusters.runs import Run
from benchmarks.clusters.sailor_files import SailorFiles

ENGINE = """\
Engine: DeepSpeed's pipeline, 1F1B, float32. A transfer occupies both ends; a member sends its share of a tensor, and
the receiving group gathers the whole; a host's members share what its network cards carry; when all devices are done,
gradients are summed, then updated. Times of layers are those of the published profiles; nothing is fitted."""


def compared(title: str, runs: Sequence[Run], steps: Mapping[str, Step]) -> Table:
    """Returns predicted beside measured, a run a row."""
    drawn = _table(
        title,
        *("run", "GPUs", "stages", "replicas", "members", "micro-batches"),
        *_right("pipeline s", "sum, update s", "predicted s", "measured s", "error"),
    )
    for run in runs:
        step, num_replicas = steps[run.name], len(run.replicas[0])
        num_microbatches = run.minibatch_size // (run.microbatch_size * num_replicas)
        drawn.add_row(
            *(run.name, str(run.num_gpus), str(len(run.stages)), str(num_replicas), _members(run)),
            f"{num_microbatches} of {run.microbatch_size}",
            *(f"{ns / 1e9:.3f}" for ns in (step.pipeline_ns, step.sum_and_update_ns, step.ns)),
            *(f"{run.measured_s:.3f}", f"{error(run, steps):+.1%}"),
        )
    return drawn


def errors(groups: Mapping[str, Sequence[Run]], steps: Mapping[str, Step]) -> Table:
    """Returns the mean and the largest error of each group of runs."""
    drawn = _table("errors", "runs of", *_right("runs", "mean", "largest"))
    for title, runs in groups.items():
        found = [abs(error(run, steps)) for run in runs]
        drawn.add_row(title, str(len(found)), f"{sum(found) / len(found):.1%}", f"{max(found):.1%}")
    return drawn


def order(runs: Sequence[Run], steps: Mapping[str, Step]) -> Table:
    """Returns the plans for the same devices and the same mini-batch, fastest first, as predicted and as measured."""
    sets: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        sets.setdefault((run.name.rsplit("/", 1)[0], run.minibatch_size), []).append(run)
    several = {key: found for key, found in sets.items() if len(found) > 1}
    drawn = _table("order of plans on the same devices", "devices", "mini-batch", "predicted", "measured", "right")
    num_right = 0
    for (devices, minibatch), found in several.items():
        predicted = sorted(found, key=lambda run: steps[run.name].ns)
        measured = sorted(found, key=lambda run: run.measured_s)
        is_right = predicted == measured
        num_right += is_right
        drawn.add_row(devices, str(minibatch), _shapes(predicted), _shapes(measured), "yes" if is_right else "no")
    drawn.caption = f"{num_right} of {len(several)} sets in the right order"
    return drawn


def others(runs: Sequence[Run], reasons: Mapping[str, str]) -> Table:
    """Returns the runs that are left out, and why."""
    drawn = _table("left out", "run", "measured s", "why")
    for run in runs:
        if run.name in reasons:
            drawn.add_row(run.name, f"{run.measured_s:.3f}", reasons[run.name])
    return drawn


def remarks(runs: Sequence[Run], files: SailorFiles) -> list[str]:
    """Returns what was put right in plans, and which file of times stands in for another."""
    lines = [f"{run.name}: {note}" for run in runs for note in run.notes]
    kinds = sorted({(run.model, gpu) for run in runs for stage in run.replicas for gpu, _ in stage})
    return lines + [said for model, gpu in kinds if (said := files.times(model, gpu)[1])]


def error(run: Run, steps: Mapping[str, Step]) -> float:
    """Returns predicted / measured - 1."""
    return steps[run.name].ns / 1e9 / run.measured_s - 1


def _members(run: Run) -> str:
    return "+".join(str(members) for members in sorted({members for stage in run.replicas for _, members in stage}))


def _shapes(runs: Sequence[Run]) -> str:
    """Returns stages x replicas of each plan."""
    return ", ".join(f"{len(run.stages)}x{len(run.replicas[0])}" for run in runs)


def _right(*titles: str) -> tuple[str, ...]:
    """Returns titles of columns of numbers, marked for `_table`."""
    return tuple(f">{title}" for title in titles)


def _table(title: str, *columns: str) -> Table:
    drawn = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold", caption_justify="left")
    for column in columns:
        is_number = column.startswith(">")
        drawn.add_column(column.removeprefix(">"), justify="right" if is_number else "left", no_wrap=is_number)
    return drawn
