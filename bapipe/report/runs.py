"""A training run: losses, evaluations, and its measurements compared with the prediction."""

from collections.abc import Iterator

from rich.table import Table

from bapipe.formats.plan import Plan
from bapipe.report.formatting import add_row, empty_table, mib, ms, number
from bapipe.runtime.train_result import Evaluation, TrainResult


def render_run(plan: Plan, result: TrainResult) -> Iterator[Table | str]:
    """Yields the losses of a run, and its measurements compared with the prediction."""
    yield f"loss {result.losses[0]:.4f} at first, {result.losses[-1]:.4f} after {len(result.losses)} steps"
    if result.evaluations:
        first, last = result.evaluations[0], result.evaluations[-1]
        first_words = f"after {first.steps} steps: {evaluation_words(first)}"
        last_words = f"; after {last.steps}: {evaluation_words(last)}" if last is not first else ""
        yield f"{first_words}{last_words}, on {last.num_samples} held-out samples"
    smaller, steps = result.as_planned.count(False), len(result.as_planned)
    if smaller:
        rate = number(plan.minibatch_size * 1e9 / result.mean_step_ns)
        rest = "; the table below is about the others" if smaller < steps else ""
        yield f"{smaller} of {steps} steps had shorter samples than the plan assumes: {rate} samples/s on average{rest}"
    table = empty_table("predicted and measured", "", "predicted>", "measured>", "prediction off by>")
    for name, (predicted, measured) in run_figures(plan, result).items():
        show = _SHOW[name.split()[0]]
        off = f"{predicted / measured - 1:+.1%}" if measured and predicted is not None else ""
        add_row(table, name, *("unknown" if value is None else show(value) for value in (predicted, measured)), off)
    yield table


def evaluation_words(evaluation: Evaluation) -> str:
    """Returns loss and metrics on held-out data in one line; metrics named `top-...` are shares, shown in per cent."""
    shown = (
        f"{name} {value:.1%}" if name.startswith("top-") else f"{name} {value:.1f}"
        for name, value in evaluation.metrics
    )
    return ", ".join((f"held-out loss {evaluation.loss:.4f}", *shown))


def run_figures(plan: Plan, result: TrainResult) -> dict[str, tuple[float | None, float | None]]:
    """Returns (predicted, measured) of step time (ns), samples per second, and peak memory of each device (bytes).

    A plan that was not judged predicts nothing.
    """
    step_ns, predicts = result.typical_step_ns, plan.is_judged
    figures: dict[str, tuple[float | None, float | None]] = {
        "step": (plan.prediction.step_ns if predicts else None, step_ns),
        "samples/s": (plan.prediction.samples_per_s if predicts else None, plan.minibatch_size * 1e9 / step_ns),
    }
    predicted = {rank.device: rank.peak_bytes for rank in plan.prediction.ranks}
    for device, peak in zip(result.devices, result.peak_bytes, strict=True):
        figures[f"peak {device}"] = (predicted.get(device), peak)
    return figures


_SHOW = {"step": ms, "samples/s": number, "peak": mib}


def run_json(plan: Plan, result: TrainResult) -> dict[str, object]:
    """Returns what `bapipe run --json` prints: losses, evaluations, times (ns) and peaks (bytes) with predictions."""
    return {
        "losses": result.losses,
        "step_ns": result.step_ns,
        "predicted_step_ns": plan.prediction.step_ns if plan.is_judged else None,
        "measured_step_ns": result.typical_step_ns,
        "mean_step_ns": result.mean_step_ns,
        "evaluations": [
            {
                "steps": evaluation.steps,
                "num_samples": evaluation.num_samples,
                "loss": evaluation.loss,
                **dict(evaluation.metrics),
            }
            for evaluation in result.evaluations
        ],
        "ranks": [
            {
                "device": device,
                "predicted_peak_bytes": figures[0],
                "measured_peak_bytes": figures[1],
                "order": [str(action) for action in order],
            }
            for device, order in zip(result.devices, result.order, strict=True)
            for figures in [run_figures(plan, result)[f"peak {device}"]]
        ],
    }
