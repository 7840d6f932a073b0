"""A training run: losses, evaluations, and its measurements compared with the prediction."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from bapipe.formats.plan import Plan
from bapipe.printable import counted, printable
from bapipe.report.formatting import add_row, empty_table, mib, ms
from bapipe.training.train_result import Evaluation, TrainResult
from bapipe.units import number, percent_change


def render_run(plan: Plan, result: TrainResult) -> Iterator[Table | str]:
    """Yields the losses of a run, and its measurements compared with the prediction."""
    yield f"loss {result.losses[0]:.4f} at first, {result.losses[-1]:.4f} after {counted(len(result.losses), 'step')}"
    if result.evaluations:
        first, last = result.evaluations[0], result.evaluations[-1]
        first_words = f"after {counted(first.steps, 'step')}: {evaluation_words(first)}"
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
        off = percent_change(predicted / measured - 1) if measured and predicted else ""
        add_row(table, name, *("unknown" if value is None else show(value) for value in (predicted, measured)), off)
    yield table
    yield from _remarks(plan, result)


MAX_WAIT = 0.05
"""Share of the time that waiting for data may take without a remark."""

MAX_SLOWDOWN = 1.15
"""How much longer than predicted a device may compute without a remark."""

MAX_UNLIKE = 1.25
"""Ratio of the largest to the smallest slowdown up to which all devices are slowed down alike."""


def _remarks(plan: Plan, result: TrainResult) -> list[str]:
    """Returns what to do about what was slower than it need be."""
    return [words for words in (_data_words(result), _slowdown_words(plan, result)) if words]


def _data_words(result: TrainResult) -> str:
    """Returns what to do about data that is loaded too slowly; empty if it is not."""
    wait_ns = result.mean_data_ns
    share = wait_ns / (wait_ns + result.mean_step_ns)
    if share <= MAX_WAIT:
        return ""
    return (
        f"waiting for data took {share:.0%} of the time, {ms(wait_ns)} before each step: more processes that load it "
        "(`data_workers`) or items that take less time to load may help"
    )


def _slowdown_words(plan: Plan, result: TrainResult) -> str:
    """Returns which devices computed longer than predicted in the last step; empty if none did, or not much.

    If all did alike, the machine was busy or slower; if one did, the layers of its stages are to blame, or that device.
    """
    predicted = {rank.device: rank.busy_ns for rank in plan.prediction.ranks}
    measured = {rank.device: rank.busy_ns for rank in result.timeline.prediction(plan.minibatch_size).ranks}
    ratios = {name: measured[name] / predicted[name] for name in measured if predicted.get(name)}
    if not ratios or max(ratios.values()) <= MAX_SLOWDOWN or not all(result.as_planned):
        return ""
    low, high = min(ratios.values()), max(ratios.values())
    if len(ratios) > 1 and high <= MAX_UNLIKE * low:
        return (
            f"every device computed {_times(low, high)} as long as predicted: this machine was busy with other "
            "programs, or is slower than when the layers were measured"
        )
    slowest = max(ratios, key=lambda name: ratios[name])
    rest = f", the others {_times(*_range(ratios, slowest))}" if len(ratios) > 1 else ""
    return f"{printable(slowest)} computed {high:.1f} times as long as predicted{rest}"


def _range(ratios: Mapping[str, float], without: str) -> tuple[float, float]:
    others = [ratio for name, ratio in ratios.items() if name != without]
    return min(others), max(others)


def _times(low: float, high: float) -> str:
    return f"{low:.1f} times" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f} times"


def evaluation_words(evaluation: Evaluation) -> str:
    """Returns loss and metrics on held-out data in one line; metrics named `top-...` are shares, shown in per cent."""
    shown = (
        f"{name} {value:.1%}" if name.startswith("top-") else f"{name} {value:.1f}"
        for name, value in evaluation.metrics
    )
    return ", ".join((f"held-out loss {evaluation.loss:.4f}", *shown))


def run_figures(plan: Plan, result: TrainResult) -> dict[str, tuple[float | None, float | None]]:
    """Returns (predicted, measured) of step time (ns), samples per second, and peak memory of each device (bytes).

    Predictions assume that data is there when a step begins; samples per second count the wait. A plan that was not
    judged predicts nothing.
    """
    step_ns, wait_ns, predicts = result.typical_step_ns, result.mean_data_ns, plan.is_judged
    rate = plan.minibatch_size * 1e9 / (step_ns + wait_ns)
    figures: dict[str, tuple[float | None, float | None]] = {
        "step": (plan.prediction.step_ns if predicts else None, step_ns),
        "wait for data": (0 if predicts else None, wait_ns),
        "samples/s": (plan.prediction.samples_per_s if predicts else None, rate),
    }
    predicted = plan.prediction.peaks_bytes
    for device, peak in zip(result.devices, result.peak_bytes, strict=True):
        figures[f"peak {device}"] = (predicted.get(device), peak)
    return figures


_SHOW = {"step": ms, "wait": ms, "samples/s": number, "peak": mib}


def run_json(plan: Plan, result: TrainResult) -> dict[str, object]:
    """Returns what `bapipe run --json` prints: losses, evaluations, times (ns) and peaks (bytes) with predictions."""
    return {
        "losses": result.losses,
        "step_ns": result.step_ns,
        "predicted_step_ns": plan.prediction.step_ns if plan.is_judged else None,
        "measured_step_ns": result.typical_step_ns,
        "mean_step_ns": result.mean_step_ns,
        "data_ns": result.data_ns,
        "mean_data_ns": result.mean_data_ns,
        "samples_per_s": run_figures(plan, result)["samples/s"][1],
        "remarks": _remarks(plan, result),
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
