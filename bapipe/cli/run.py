"""Commands that train, and give out what was trained: run, export."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import bapipe
from bapipe import report
from bapipe.cli.inputs import read_or_make_plan
from bapipe.cli.options import Arguments, AsJson, Output, key_values
from bapipe.cli.progress import err, note, out, show_parts
from bapipe.errors import BapipeError
from bapipe.formats.codec import check_writable, read, write_bytes
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.runtime.run import export as export_checkpoint
from bapipe.runtime.train_result import Evaluation, StepReport, TrainResult


def run(
    source: Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="Plan file, or a model to profile and plan.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to train.")] = 20,
    data: Annotated[
        str, typer.Option("--data", help="What to train on: synthetic, or what the README lists for the model.")
    ] = "synthetic",
    augment: Annotated[
        bool, typer.Option("--augment", help="Train on pieces of a folder's images, drawn at random and mirrored.")
    ] = False,
    buckets: Annotated[
        int, typer.Option("--buckets", min=1, help="Lengths that sentences are padded to; else all to the longest.")
    ] = 1,
    learning_rate: Annotated[
        float | None, typer.Option("--lr", min=0.0, help="Learning rate; else the model's own.")
    ] = None,
    lr_schedule: Annotated[str, typer.Option("--lr-schedule", help="constant, linear or cosine.")] = "constant",
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps in which the learning rate grows.")] = 0,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="Class of torch.optim; else the one that was profiled.")
    ] = None,
    optimizer_arg: Annotated[
        list[str] | None,
        typer.Option("--optimizer-arg", metavar="KEY=VALUE", help="Argument of the optimizer; may be repeated."),
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option("--clip-norm", help="Most that the norm of all gradients together may be.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Folder for checkpoints.")] = None,
    checkpoint_every: Annotated[
        int, typer.Option("--checkpoint-every", min=1, help="Steps between two checkpoints; the last step is one.")
    ] = 100,
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many checkpoints stay.")] = 3,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    replan: Annotated[
        bool, typer.Option("--replan", help="When devices are gone, plan for the others and go on.")
    ] = False,
    profile: Annotated[
        list[Path] | None, typer.Option("--profile", help="With --replan: profile to plan with; may be repeated.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="DEVICE", help="With --replan: is gone; may be repeated.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds that a rank may wait for another before the run ends.")
    ] = 600.0,
    eval_every: Annotated[
        int | None,
        typer.Option("--eval-every", min=1, help="Evaluate on held-out data after so many steps, and at the end."),
    ] = None,
    eval_samples: Annotated[
        int | None,
        typer.Option(
            "--eval-samples", min=1, help="How many to evaluate on; else all held out, or a tenth of the data."
        ),
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option("--tensorboard", help="Folder for TensorBoard's scalars.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weights, the order of the data, and dropout.")] = 0,
    arg: Arguments = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the last step's measured timeline as a Chrome trace.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model exactly as its plan says, with one process per device."""
    if trace is not None:
        check_writable(trace)
    if resume and checkpoint is None:
        raise BapipeError("--resume needs --checkpoint FOLDER, the one to go on from")
    if eval_samples is not None and eval_every is None:
        raise BapipeError("--eval-samples goes with --eval-every STEPS, which says when to evaluate")
    if profile and not replan:
        raise BapipeError(f"--profile {profile[0]} goes with --replan; a plan runs without its profile")
    decided = read_or_make_plan(source, arg)

    def replanned(why: str, made: Plan) -> None:
        nonlocal decided
        decided = made
        if os.environ.get("RANK", "0") == "0":
            devices = ", ".join(name for stage in made.stages for name in stage.devices)
            step = report.ms(made.prediction.step_ns)
            note(f"{why}; going on with stages on {devices}, {step} a step predicted")

    result = train_with_bar(
        decided,
        steps,
        data=data,
        buckets=buckets,
        augment=augment,
        learning_rate=learning_rate,
        learning_rate_schedule=lr_schedule,
        warmup_steps=warmup,
        optimizer=optimizer,
        optimizer_arguments=key_values(optimizer_arg, "--optimizer-arg", "weight_decay=0.01"),
        clip_norm=clip_norm,
        seed=seed,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        timeout_s=timeout,
        evaluate_every=eval_every,
        evaluate_samples=eval_samples,
        tensorboard=tensorboard,
        replan=replan,
        profiles=[read(path, ModelProfile) for path in profile] if profile else None,
        without=without or (),
        on_replan=replanned,
    )
    if os.environ.get("RANK", "0") != "0":  # of a torchrun job: rank 0 reports
        return
    if trace is not None:
        write_bytes(trace, report.encode_trace([("measured", result.timeline)]))
    if as_json:
        sys.stdout.write(json.dumps(report.run_json(decided, result)) + "\n")
        return
    show_parts(report.render_run(decided, result))
    out.print(report.gantt(result.timeline, out.width), highlight=False, no_wrap=True)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of checkpoints, or one of them.")],
    output: Output = Path("model.safetensors"),
) -> None:
    """Write the weights of a checkpoint as a safetensors file.

    The tensors have the names of the original module.
    """
    check_writable(output)
    num_tensors = export_checkpoint(checkpoint, output)
    out.print(f"wrote {num_tensors} tensors to {output}", highlight=False)


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
