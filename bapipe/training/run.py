"""Training a plan, and exporting the trained model."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bapipe._optional import require_torch
from bapipe.errors import BapipeError
from bapipe.formats.files import place_file
from bapipe.formats.plan import Plan, check_plan
from bapipe.formats.settings import Settings, check_same, check_same_optimizer
from bapipe.job.refusal import refusals_told
from bapipe.module_path import current_folder_importable
from bapipe.optimizers import rule_of
from bapipe.options import options_from
from bapipe.planner.inputs.profiles import Profiles, by_kind
from bapipe.processes import check_not_imported
from bapipe.runtime.runnable import check_no_groups, type_to_run
from bapipe.torchrun import current_job, is_first_rank
from bapipe.training.replan import run_with_replanning
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import Evaluation, OnEvaluation, OnStep, StepReport, TrainResult

if TYPE_CHECKING:
    from torch import nn

    from bapipe.zoo.example import Example


def run(
    plan: Plan,
    config: TrainConfig | None = None,
    *,
    profiles: Profiles | None = None,
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_replan: Callable[[str, Plan], None] | None = None,
    **options: object,
) -> TrainResult:
    """Trains a plan's model with one process per device, or as part of a torchrun job.

    Args:
        config: how to train; or give its options as keywords: `bapipe.run(plan, steps=100, data="mnist")`. With
            `resume`, options that are not given are those of the checkpoint's run.
        profiles: what to plan with if devices are lost; by default those that the plan was made from.
        on_step: called with a report of every step. The ranks do not wait for it; under torchrun, where it is called
            only in rank 0, the others do, for up to `timeout_s`.
        on_evaluation: called with the number of held-out samples done, their total, and the evaluation when all are
            done, else None; under torchrun in rank 0 only.
        on_replan: called with the reason and the new plan.

    Raises:
        BapipeError: the plan does not fit the model, the machine or the data.
        RunFailed: a rank failed, was killed, or kept another one waiting for `timeout_s`; a loss or weights are not
            finite; or a checkpoint cannot be written.
        Stopped: SIGTERM or SIGHUP asked the run to end, and all ranks have ended.
    """
    given = options if config is None else _set_in(config)
    config = options_from(TrainConfig, config, options)
    return run_configured(plan, config, given, profiles, on_step, on_evaluation, on_replan)


def run_configured(
    plan: Plan,
    config: TrainConfig,
    given: Collection[str],
    profiles: Profiles | None,
    on_step: OnStep | None,
    on_evaluation: OnEvaluation | None,
    on_replan: Callable[[str, Plan], None] | None,
) -> TrainResult:
    """Trains as `run` does, with the same arguments and errors.

    Args:
        given: names of the options that the user has set, even to their defaults: with `resume`, the others are those
            of the checkpoint's run.
    """
    check_not_imported()
    check_plan(plan)
    check_profiles_used(profiles, config)
    with refusals_told():
        if config.resume:
            config = _resumed(config, given)
        return _run(plan, config, profiles, on_step, on_evaluation, on_replan)


def _run(
    plan: Plan,
    config: TrainConfig,
    profiles: Profiles | None,
    on_step: OnStep | None,
    on_evaluation: OnEvaluation | None,
    on_replan: Callable[[str, Plan], None] | None,
) -> TrainResult:
    check_no_groups(plan)
    factory = config.factory or plan.factory
    if factory is None:
        raise BapipeError(
            f"the plan of {plan.model} names no factory, so there is nothing to build the model with: profile it as "
            "module.path:function, give bapipe.run a factory, or use bapipe.Pipeline in a script of your own"
        )
    require_torch()
    from bapipe.zoo.trust import check_trusted

    if config.factory is None and plan.factory is not None:
        check_trusted(plan.factory, config.trust_factory)
    settings = plan.compute_settings
    if not config.replan:
        _check_devices(plan, settings.threads)
    _check_optimizer(settings, config)
    from bapipe.training.build import model_build
    from bapipe.training.data.training_data import training_data
    from bapipe.training.train import train

    arguments = dict(plan.arguments if config.arguments is None else config.arguments)
    with (
        current_folder_importable(),
        _reporting(plan, config.tensorboard, on_step, on_evaluation) as (report_step, report_evaluation),
    ):
        make, example = model_build(factory, arguments, config.seed)
        if plan.settings is not msgspec.UNSET:
            check_same(settings, msgspec.structs.replace(settings, dtype=_dtype(example.module)))
        _check_weights(config, example)
        dataset = training_data(config, make, example)

        def train_plan(current: Plan, resume: bool) -> TrainResult:
            return train(
                current,
                make,
                dataset,
                replace(config, resume=resume),
                example=example,
                on_step=report_step,
                on_evaluation=report_evaluation,
            )

        if not config.replan:
            return train_plan(plan, config.resume)
        return run_with_replanning(
            plan,
            {} if profiles is None else by_kind(profiles),
            train_plan,
            without=config.without,
            resume=config.resume,
            on_replan=on_replan or (lambda reason, new_plan: None),
        )


def check_profiles_used(profiles: object, config: TrainConfig) -> None:
    """Raises BapipeError if profiles are given that a run does not use."""
    if profiles is not None and not config.replan:
        raise BapipeError("`profiles` goes with `replan`: a plan runs without its profile")


def _set_in(config: TrainConfig) -> set[str]:
    """Returns the names of the options that are not the default ones."""
    default = TrainConfig()
    return {field.name for field in fields(config) if getattr(config, field.name) != getattr(default, field.name)}


def _resumed(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    require_torch()
    from bapipe.training.checkpoint.options import resumed_options

    return resumed_options(config, given, tell=is_first_rank())


def check_training(factory: str, arguments: Mapping[str, object], config: TrainConfig) -> None:
    """Raises BapipeError if a model cannot be built and trained with a configuration; measures and trains nothing.

    It checks that the configuration trusts the factory, and that its data and its weights to start from fit the model.
    """
    require_torch()
    from bapipe.training.build import model_build
    from bapipe.training.data.training_data import training_data
    from bapipe.zoo.trust import check_trusted

    check_trusted(factory, config.trust_factory)
    with current_folder_importable():
        build, example = model_build(factory, dict(arguments), config.seed)
        _check_weights(config, example)
        training_data(config, build, example)


def _check_weights(config: TrainConfig, example: "Example") -> None:
    """Raises BapipeError if the weights to start from are not the model's; a run that resumes does not read them."""
    if config.weights is not None:
        from bapipe.training.checkpoint.folder import list_checkpoints
        from bapipe.training.checkpoint.weights import check_weights

        folder = config.checkpoint if config.resume else None
        if folder is None or not folder.is_dir() or not list_checkpoints(folder):
            check_weights(config.weights, example.module)


@contextmanager
def _reporting(
    plan: Plan, folder: Path | None, on_step: OnStep | None, on_evaluation: OnEvaluation | None
) -> Iterator[tuple[OnStep | None, OnEvaluation | None]]:
    """Yields callbacks that also write what is reported for TensorBoard, if there is a folder for it."""
    if folder is None:
        yield on_step, on_evaluation
        return
    from bapipe.training.tensorboard import tensorboard_writer

    with tensorboard_writer(folder, plan.minibatch_size) as writer:

        def write_step(report: StepReport) -> None:
            writer.write_step(report)
            if on_step is not None:
                on_step(report)

        def write_evaluation(done: int, total: int, evaluation: Evaluation | None) -> None:
            if evaluation is not None:
                writer.write_evaluation(evaluation)
            if on_evaluation is not None:
                on_evaluation(done, total, evaluation)

        yield write_step, write_evaluation


def _check_optimizer(settings: Settings, config: TrainConfig) -> None:
    """Raises BapipeError for another optimizer than the profiled one; those without a name there are not compared."""
    name, arguments = config.optimizer_for(settings)
    rule = rule_of(name, momentum=arguments.get("momentum", 0)) or settings.optimizer
    # The other settings are compared where they are known: the dtype when the model is built, the rest in every rank.
    has_own = "momentum" in config.optimizer_arguments
    excess = "`momentum` out of `optimizer_arguments`" if has_own else "`optimizer` out"
    check_same_optimizer(settings, rule, f"leave {excess}, or ")


def export(checkpoint: Path, output: Path, place: Callable[[Path, Path], None] = place_file) -> int:
    """Writes the model's tensors of a checkpoint, or of the newest in a folder, as safetensors; returns how many.

    They have the names of the original module's `state_dict()`.

    Args:
        place: moves a finished file, its second argument, to where the first one says.

    Raises:
        BapipeError: there is no checkpoint, it is damaged, or the file cannot be written.
    """
    require_torch()
    from bapipe.training.checkpoint.export import export as write_state

    return write_state(checkpoint, output, place)


def convert_checkpoint(folder: Path) -> tuple[Path, ...]:
    """Converts the checkpoints of an older version in a folder, or one of them; returns their paths.

    Of the old index of tensors, a pickle that could run code, only names and places are read.

    Raises:
        BapipeError: there is none, one is damaged, or a run writes to the folder.
    """
    require_torch()
    from bapipe.training.checkpoint.convert import convert

    return convert(folder)


def _dtype(module: "nn.Module") -> str:
    from bapipe.torch_device import dtype_name

    return dtype_name(next(module.parameters()).dtype)


def _check_devices(plan: Plan, num_threads: int) -> None:
    """Raises BapipeError for a plan with more devices than this machine has; under torchrun processes are counted."""
    kind, num_used = type_to_run(plan), len(plan.used_devices)
    if current_job() is not None:
        return
    from bapipe.torch_device import num_devices

    have = num_devices(kind)
    if num_used > have:
        raise BapipeError(
            f"the plan uses {num_used} {kind} devices and this machine has {have}: plan for a cluster of the "
            "devices that it has, or start the run on more machines with torchrun"
        )
    if kind == "cpu" and num_used * num_threads > have:
        raise BapipeError(
            f"the plan uses {num_threads} threads on each of {num_used} cpu devices and this machine has {have} "
            f"cores: profile with `threads` {max(have // num_used, 1)}, and plan again"
        )
