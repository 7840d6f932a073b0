"""Train a plan, and export what was trained."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bapipe._optional import require_torch
from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.formats.settings import Settings, check_same
from bapipe.planner.inputs import Profiles, by_kind
from bapipe.runtime.replan import run_on_what_is_left
from bapipe.runtime.train_config import MOMENTUM, Training
from bapipe.runtime.train_result import Evaluation, StepReport, TrainResult

if TYPE_CHECKING:
    from torch import nn


OnStep = Callable[[StepReport], None]

OnEvaluation = Callable[[int, int, Evaluation | None], None]
"""(held-out samples done, all of them, what was found when all are)"""


def run(
    plan: Plan,
    *,
    factory: str | None = None,
    arguments: Mapping[str, object] | None = None,
    data: str = "synthetic",
    buckets: int = 1,
    augment: bool = False,
    steps: int = 20,
    learning_rate: float | None = None,
    optimizer: str | None = None,
    optimizer_arguments: Mapping[str, object] | None = None,
    learning_rate_schedule: str = "constant",
    warmup_steps: int = 0,
    clip_norm: float | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    checkpoint_every: int = 100,
    keep: int = 3,
    resume: bool = False,
    timeout_s: float = 600.0,
    evaluate_every: int | None = None,
    evaluate_samples: int | None = None,
    tensorboard: Path | None = None,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    replan: bool = False,
    profiles: Profiles | None = None,
    without: Collection[str] = (),
    on_replan: Callable[[str, Plan], None] | None = None,
) -> TrainResult:
    """Trains a plan's model, one process a device, or as a part of a torchrun job.

    Args:
        factory: `module.path:function` that returns a `bapipe.Example`; the plan's own where None.
        arguments: what the factory is called with; the plan's own where None.
        steps: in all, those before the checkpoint that it goes on from included.
        learning_rate: the example's own where None.
        optimizer, optimizer_arguments: a class of `torch.optim`, and what it takes besides; SGD has momentum 0.9. The
            one that the plan's profile was measured with where None.
        learning_rate_schedule: constant, linear or cosine, after `warmup_steps` in which it grows.
        clip_norm: the most that the norm of all gradients together may be.
        checkpoint: a folder for checkpoints, one every `checkpoint_every` steps and one at the end; `keep` stay.
        resume: goes on from the newest one there, where there is one, whatever plan it was made under.
        timeout_s: how long a rank may wait for another before the run ends.
        data: what the example's `data` opens, such as mnist, synthetic, or a folder; or `module.path:function`, which
            returns a data set whose items are as those of `bapipe.Example.data`.
        evaluate_every: steps after which the model is evaluated on held-out data, and so it is after the last; None
            does not, and holds no data out.
        evaluate_samples: how many held-out samples are looked at, drawn from the seed; else all that the data holds
            out, or a tenth of data that holds none out, which is then not trained on.
        tensorboard: a folder for TensorBoard's scalars of every step and evaluation.
        buckets: how many lengths sentences are padded to, so that those of like lengths are trained on together; the
            plan's length is the longest.
        augment: trains on pieces of a folder's images, drawn at random and mirrored half of the time.
        on_step: called after every step; under torchrun in rank 0 only.
        on_evaluation: called with how many held-out samples are done, how many there are, and what was found when all
            are; under torchrun in rank 0 only.
        replan: where devices are gone, plans for the others and goes on from the newest checkpoint; the result is then
            of the steps since. Gone are those in `without`; the last ones where the job has fewer processes, or this
            machine fewer devices, than the plan uses; and those of ranks of this machine that die or hang.
        profiles: what to plan with again; those the plan was made from where None.
        on_replan: called with the reason and the new plan.

    Raises:
        BapipeError: the plan does not fit the model, the machine or the data.
        RunFailed: a rank died.
    """
    factory = factory or plan.factory
    if factory is None:
        raise BapipeError(
            f"the plan of {plan.model} names no factory, so there is nothing to build the model with: profile it as "
            "module.path:function, or use bapipe.Pipeline in a script of your own"
        )
    if replan and checkpoint is None:
        raise BapipeError("--replan needs --checkpoint FOLDER, to go on from")
    if without and not replan:
        raise BapipeError(f"--without {', '.join(without)} goes with --replan")
    require_torch()
    planned = Settings() if plan.settings is msgspec.UNSET else plan.settings
    if not replan:
        _check_devices(plan, planned.threads)
    optimizer, optimizer_arguments = _optimizer(planned, optimizer, optimizer_arguments or {})
    from bapipe.runtime.checkpoint.config import CheckpointConfig
    from bapipe.runtime.train import train
    from bapipe.zoo.data.dataset import as_pipeline_dataset
    from bapipe.zoo.data.open_dataset import augmented, bucketed, open_data
    from bapipe.zoo.factory import build, current_folder_importable

    given = dict(plan.arguments if arguments is None else arguments)
    with current_folder_importable(), _reporting(plan, tensorboard, on_step, on_evaluation) as (stepped, evaluated):
        example = build(factory, given, meta=True)
        if plan.settings is not msgspec.UNSET:
            check_same(planned, msgspec.structs.replace(planned, dtype=_dtype(example.module)))
        training = Training(
            steps=steps,
            learning_rate=example.learning_rate if learning_rate is None else learning_rate,
            optimizer=optimizer,
            optimizer_arguments=optimizer_arguments,
            schedule=learning_rate_schedule,
            warmup_steps=warmup_steps,
            clip_norm=clip_norm,
            autocast=planned.autocast,
            threads=planned.threads,
            seed=seed,
            evaluate_every=evaluate_every,
            evaluate_samples=evaluate_samples,
        )
        make = partial(build, factory, given, meta=True)
        found = as_pipeline_dataset(open_data(data, example.data, factory))
        opened = augmented(bucketed(found, buckets, data), augment, data)

        def go(current: Plan, resumes: bool) -> TrainResult:
            keeping = None
            if checkpoint is not None:
                keeping = CheckpointConfig(folder=checkpoint, every=checkpoint_every, keep=keep, resume=resumes)
            return train(
                current,
                make,
                opened,
                training,
                keeping=keeping,
                timeout_s=timeout_s,
                on_step=stepped,
                on_evaluation=evaluated,
            )

        if not replan:
            return go(plan, resume)
        known = {} if profiles is None else by_kind(profiles)
        return run_on_what_is_left(plan, known, without, resume, go, on_replan or (lambda why, made: None))


@contextmanager
def _reporting(
    plan: Plan, folder: Path | None, on_step: OnStep | None, on_evaluation: OnEvaluation | None
) -> Iterator[tuple[OnStep | None, OnEvaluation | None]]:
    """Has what is reported written for TensorBoard too, where there is a folder for it."""
    if folder is None:
        yield on_step, on_evaluation
        return
    from bapipe.runtime.tensorboard import tensorboard_writer

    with tensorboard_writer(folder, plan.minibatch_size) as writer:

        def stepped(report: StepReport) -> None:
            writer.write_step(report)
            if on_step is not None:
                on_step(report)

        def evaluated(done: int, total: int, found: Evaluation | None) -> None:
            if found is not None:
                writer.write_evaluation(found)
            if on_evaluation is not None:
                on_evaluation(done, total, found)

        yield stepped, evaluated


def _optimizer(
    planned: Settings, name: str | None, arguments: Mapping[str, object]
) -> tuple[str, Mapping[str, object]]:
    """Returns the optimizer to train with; a profile measured with another, or settings not run, are refused.

    Optimizers that profiles do not know are not compared.
    """
    if name is None:
        name, own = _MEASURED.get(planned.optimizer, (planned.optimizer, {}))
        arguments = {**own, **arguments}
    measured = name.lower() if name.lower() in ("adam", "adamw") else planned.optimizer
    if name.lower() == "sgd":
        measured = "sgd-momentum" if arguments.get("momentum", 0 if arguments else MOMENTUM) else "sgd"
    run = Settings(dtype=planned.dtype, optimizer=measured, threads=planned.threads, autocast=planned.autocast)
    check_same(planned, run)
    return name, arguments


_MEASURED: dict[str, tuple[str, Mapping[str, object]]] = {
    "sgd": ("sgd", {"momentum": 0}),
    "sgd-momentum": ("sgd", {"momentum": MOMENTUM}),
}
"""What stands for the optimizers of profiles that have another name in torch."""


def export(checkpoint: Path, output: Path) -> int:
    """Writes the model's tensors of a checkpoint, or of the newest in a folder, as safetensors; returns how many.

    They have the names of the original module's `state_dict()`.

    Raises:
        BapipeError: there is no checkpoint, it is damaged, or the file cannot be written.
    """
    require_torch()
    from bapipe.runtime.checkpoint.export import export as write_state

    return write_state(checkpoint, output)


def _dtype(module: "nn.Module") -> str:
    """Returns the type of a module's parameters, as profiles write it."""
    return str(next(module.parameters()).dtype).removeprefix("torch.")


def _check_devices(plan: Plan, num_threads: int) -> None:
    """Refuses a plan for more devices than there are here; a torchrun job counts its own."""
    if "RANK" in os.environ:
        return
    from bapipe.torch_device import num_devices

    used = {name for stage in plan.stages for name in stage.devices}
    kinds = {device.kind for device in plan.cluster.devices if device.name in used}
    for kind in sorted(kinds):
        have = num_devices(kind)
        if len(used) > have:
            raise BapipeError(
                f"the plan uses {len(used)} {kind} devices and this machine has {have}: plan with --devices {have}, "
                "or start it on more machines with torchrun"
            )
        if kind == "cpu" and len(used) * num_threads > have:
            raise BapipeError(
                f"the plan uses {num_threads} threads on each of {len(used)} cpu devices and this machine has {have} "
                f"cores: profile with --threads {max(have // len(used), 1)}, and plan again"
            )
