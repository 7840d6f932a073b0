"""Commands that train, and give out what was trained: run, export."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from bapipe import report
from bapipe.cli.options import Arguments, AsJson, Output, key_values, plan_of
from bapipe.cli.progress import note, out, show_parts, train_with_bar
from bapipe.errors import BapipeError
from bapipe.formats.codec import check_writable, read, write_bytes
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.runtime.run import export as export_checkpoint


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
    """Train a model exactly as its plan says, one process a device."""
    if trace is not None:
        check_writable(trace)
    if resume and checkpoint is None:
        raise BapipeError("--resume needs --checkpoint FOLDER, the one to go on from")
    if eval_samples is not None and eval_every is None:
        raise BapipeError("--eval-samples goes with --eval-every STEPS, which says when to evaluate")
    if profile and not replan:
        raise BapipeError(f"--profile {profile[0]} goes with --replan; a plan runs without its profile")
    decided = plan_of(source, arg)

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
    """Write a trained model as safetensors, with the names of the original module."""
    check_writable(output)
    num_tensors = export_checkpoint(checkpoint, output)
    out.print(f"wrote {num_tensors} tensors to {output}", highlight=False)
