"""Commands that train, and export what was trained: run, export, convert-checkpoint."""

import time
from collections.abc import Collection
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bapipe import report
from bapipe.cli.attribute_docs import attribute_docs
from bapipe.cli.flags import with_flags
from bapipe.cli.inputs import is_file, read_or_make_plan
from bapipe.cli.options import Arguments, AsJson, ModelDevice, Output, key_values
from bapipe.cli.outputs import check_output, write_output_bytes, write_output_file
from bapipe.cli.printing import err, note, show_json, show_line, show_parts, show_timeline
from bapipe.cli.progress import named_while_silent
from bapipe.formats.codec import read
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.job.refusal import refusals_told
from bapipe.planner.inputs.profiles import Profiles
from bapipe.printable import counted
from bapipe.torchrun import is_first_rank
from bapipe.training.run import check_profiles_used, check_training, run_configured
from bapipe.training.run import convert_checkpoint as convert
from bapipe.training.run import export as export_checkpoint
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import Evaluation, StepReport, TrainResult
from bapipe.units import MAX_INT, number
from bapipe.zoo import resolve

_HELP = attribute_docs(TrainConfig)


def run(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="Plan file, or a model to profile and plan.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help=_HELP["steps"])] = 20,
    data: Annotated[str, typer.Option("--data", help=_HELP["data"])] = "synthetic",
    data_workers: Annotated[int | None, typer.Option("--data-workers", min=0, help=_HELP["data_workers"])] = None,
    augment: Annotated[bool, typer.Option("--augment", help=_HELP["augment"])] = False,
    skip_unreadable: Annotated[bool, typer.Option("--skip-unreadable", help=_HELP["skip_unreadable"])] = False,
    buckets: Annotated[int, typer.Option("--buckets", min=1, help=_HELP["buckets"])] = 1,
    learning_rate: Annotated[float | None, typer.Option("--lr", min=0.0, help=_HELP["learning_rate"])] = None,
    lr_schedule: Annotated[str, typer.Option("--lr-schedule", help=_HELP["learning_rate_schedule"])] = "constant",
    warmup: Annotated[int, typer.Option("--warmup", min=0, help=_HELP["warmup_steps"])] = 0,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help=_HELP["optimizer"])] = None,
    optimizer_arg: Annotated[
        list[str] | None,
        typer.Option("--optimizer-arg", metavar="KEY=VALUE", help="Argument of the optimizer; may be repeated."),
    ] = None,
    clip_norm: Annotated[float | None, typer.Option("--clip-norm", help=_HELP["clip_norm"])] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help=_HELP["checkpoint"])] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", min=1, help=_HELP["checkpoint_every"])
    ] = None,
    keep: Annotated[int | None, typer.Option("--keep", min=1, help=_HELP["keep"])] = None,
    resume: Annotated[bool, typer.Option("--resume", help=_HELP["resume"])] = False,
    replan: Annotated[bool, typer.Option("--replan", help=_HELP["replan"])] = False,
    profile: Annotated[
        list[Path] | None,
        typer.Option("--profile", help="Profile to plan with, with --replan; may be repeated."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="DEVICE", help="Device to plan without, with --replan; may be repeated."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, max=1e9, help=_HELP["timeout_s"])] = 600.0,
    eval_every: Annotated[int | None, typer.Option("--eval-every", min=1, help=_HELP["evaluate_every"])] = None,
    eval_samples: Annotated[int | None, typer.Option("--eval-samples", min=1, help=_HELP["evaluate_samples"])] = None,
    report_every: Annotated[int | None, typer.Option("--report-every", min=1, help=_HELP["report_every"])] = None,
    tensorboard: Annotated[Path | None, typer.Option("--tensorboard", help=_HELP["tensorboard"])] = None,
    seed: Annotated[int, typer.Option("--seed", min=-MAX_INT, max=MAX_INT, help=_HELP["seed"])] = 0,
    weights: Annotated[Path | None, typer.Option("--weights", help=_HELP["weights"])] = None,
    arg: Arguments = None,
    device: ModelDevice = "cpu",
    trust_factory: Annotated[
        str | None, typer.Option("--trust-factory", metavar="MODULE.PATH:FUNCTION", help=_HELP["trust_factory"])
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the last step's measured timeline as a Chrome trace.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model exactly as its plan says, with one process per device."""
    with refusals_told():
        if trace is not None:
            check_output(trace, Path(source), *(profile or ()), *([weights] if weights else []))
        config = TrainConfig(
            trust_factory=trust_factory or (None if is_file(source) else resolve(source)),  # a model that is named
            data=data,
            data_workers=data_workers,
            buckets=buckets,
            augment=augment,
            skip_unreadable=skip_unreadable,
            steps=steps,
            learning_rate=learning_rate,
            learning_rate_schedule=lr_schedule,
            warmup_steps=warmup,
            optimizer=optimizer,
            optimizer_arguments=key_values(optimizer_arg, "--optimizer-arg", "weight_decay=0.01"),
            clip_norm=clip_norm,
            seed=seed,
            weights=weights,
            evaluate_every=eval_every,
            evaluate_samples=eval_samples,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            keep=keep,
            resume=resume,
            replan=replan,
            without=tuple(without or ()),
            timeout_s=timeout,
            report_every=report_every,
            tensorboard=tensorboard,
        )
        check_profiles_used(profile or None, config)
        if not is_file(source):  # measuring takes minutes, so what is wrong with data or weights is said before
            check_training(resolve(source), key_values(arg), config)
        plan = read_or_make_plan(source, arg, device)
        profiles = [read(path, ModelProfile) for path in profile] if profile else None
    plan, result = train_with_bar(plan, config, given_options(context), profiles)
    if not is_first_rank():  # of a torchrun job: rank 0 reports
        return
    if trace is not None:
        write_output_bytes(trace, report.encode_trace([("measured", result.timeline)]))
    if as_json:
        show_json(report.run_json(plan, result))
        return
    show_parts(with_flags(part) if isinstance(part, str) else part for part in report.render_run(plan, result))
    show_timeline(result.timeline)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of checkpoints, or one of them.")],
    as_json: AsJson = False,
    output: Output = Path("model.safetensors"),
) -> None:
    """Write the weights of a checkpoint as a safetensors file.

    Tensors have their names in the original module.
    """
    check_output(output)
    num_tensors = export_checkpoint(checkpoint, output, write_output_file)
    if as_json:
        show_json({"file": str(output), "num_tensors": num_tensors})
        return
    show_line(f"wrote {counted(num_tensors, 'tensor')} to {output}")


def convert_checkpoint(
    folder: Annotated[Path, typer.Argument(help="Folder of checkpoints, or one of them.")],
    as_json: AsJson = False,
) -> None:
    """Convert checkpoints of an older version, without running code in them.

    Their tensors are copied as they are: the numbers in the files are trusted. The list that says where each tensor is,
    a pickle, is not: nothing that it names is imported or called. Old checkpoints are kept, as old-step-...
    """
    converted = convert(folder)
    if as_json:
        show_json({"converted": [str(path) for path in converted]})
        return
    for path in converted:
        show_line(f"converted {path}; the old one is kept as old-{path.name}")


SPELLINGS = {
    "learning_rate_schedule": "lr_schedule",
    "warmup_steps": "warmup",
    "optimizer_arguments": "optimizer_arg",
    "evaluate_every": "eval_every",
    "evaluate_samples": "eval_samples",
    "timeout_s": "timeout",
}
"""The parameters of `run` that have another name than their field of `TrainConfig`."""


def given_options(context: typer.Context) -> tuple[str, ...]:
    """Returns the fields of `TrainConfig` that the command line sets: a run that resumes takes over the others."""
    sources = {name: context.get_parameter_source(SPELLINGS.get(name, name)) for name in _HELP}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return ("trust_factory", *(name for name in given if name != "trust_factory"))


def train_with_bar(
    plan: Plan, config: TrainConfig, given: Collection[str], profiles: Profiles | None = None
) -> tuple[Plan, TrainResult]:
    """Trains with a bar on a terminal, and with a line every two seconds elsewhere.

    Returns the last plan (a new one if devices were lost) and the measurements.

    Args:
        given: names of the options that the user has set.
    """
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    starting = f"starting {counted(len(plan.stages), 'stage')}: building the model, comparing its stages with it"
    with (
        Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar,
        named_while_silent(starting) if is_first_rank() else nullcontext(lambda: None) as has_started,
    ):
        task = bar.add_task(starting, total=config.steps)
        printed_s, first = 0.0, None

        def on_step(done: StepReport) -> None:
            nonlocal printed_s, first
            has_started()
            rate, now_s = plan.minibatch_size * 1e9 / (done.data_ns + done.step_ns), time.monotonic()
            text = f"loss {done.loss:.4f}  {number(rate)} samples/s  bubble {done.bubble:.0%}"
            first = first or (done.step, now_s)
            bar.update(task, completed=done.step + 1, description=text)
            if not err.is_terminal and (now_s - printed_s > 2 or done.step + 1 == config.steps):
                printed_s = now_s
                note(f"step {done.step + 1}/{config.steps}  {text}{time_left(done.step, config.steps, first, now_s)}")

        def on_evaluation(done: int, total: int, evaluation: Evaluation | None) -> None:
            if evaluation is None:
                bar.update(task, description=f"evaluating: {done} of {total} samples")
            else:
                words, duration = report.evaluation_words(evaluation), report.ms(evaluation.elapsed_ns)
                note(f"step {evaluation.steps}/{config.steps}  {words}, {total} samples in {duration}")

        def on_replan(reason: str, new_plan: Plan) -> None:
            nonlocal plan
            has_started()
            plan = new_plan
            if is_first_rank():
                devices = ", ".join(name for stage in plan.stages for name in stage.devices)
                step = report.ms(plan.prediction.step_ns)
                note(with_flags(f"{reason}; continuing with stages on {devices}, {step} per step predicted"))

        try:
            result = run_configured(plan, config, given, profiles, on_step, on_evaluation, on_replan)
        except KeyboardInterrupt:
            bar.stop()
            note("interrupted: all ranks have ended")
            raise typer.Exit(130) from None
    return plan, result


def time_left(step: int, steps: int, first: tuple[int, float], now_s: float) -> str:
    """Returns the time that the steps after `step` will take, from the pace since the first step; empty if unknown."""
    if step == first[0] or step + 1 == steps:
        return ""
    left_s = (now_s - first[1]) / (step - first[0]) * (steps - step - 1)
    return f"  {timedelta(seconds=round(left_s))} left"
