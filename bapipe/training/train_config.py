"""All options of a training run, from the command line through `bapipe.run` to every rank."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated

import msgspec

from bapipe.errors import BapipeError
from bapipe.field_types import check_fields
from bapipe.formats.settings import Settings
from bapipe.optimizers import OPTIMIZERS, check_clip_norm
from bapipe.units import MAX_INT, NonNegative, NonNegativeFloat, Positive

DEFAULT_CHECKPOINT_EVERY, DEFAULT_KEEP = 100, 3

Timeout = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
"""Seconds, up to about 30 years, which timeouts of torch can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How to train a plan's model.

    The command line shows these texts as the help of `bapipe run`.

    Attributes:
        factory: function that returns a `bapipe.Example`, or its name as `module.path:function`; by default the plan's
            own.
        arguments: arguments of the factory; by default the plan's own.
        trust_factory: name of the plan's factory, to allow it if it is neither in the zoo nor in a module in the
            current folder: calling a function that a file names may do anything.
        data: what to train on: synthetic, what docs/data.md lists for the model such as mnist or a folder, or
            `module.path:function` that returns a data set.
        data_workers: processes per rank that load data in the background; 0 loads it between steps. By default 0, or
            up to 4 (8 for a GPU) if the data is slow to load, as image files are (for GPUs images made up, too), and
            this machine has cores to spare; under torchrun 0. It does not change results.
        buckets: number of lengths that sentences are padded to, so that those of similar lengths are trained on
            together; the longest is the plan's.
        augment: train on random crops of a folder's images, mirrored half of the time.
        skip_unreadable: leave out images that cannot be read, and say how many; every file is read once before
            training. By default the first one ends the run.
        steps: optimizer steps in total, including those before the checkpoint that training resumes from.
        learning_rate: learning rate after the warm-up; by default the model's own.
        learning_rate_schedule: course of the learning rate after the warm-up: constant, linear or cosine.
        warmup_steps: steps in which the learning rate grows linearly to its full value.
        optimizer: class of torch.optim except LBFGS, or sgd-momentum, in upper or lower case; by default the one that
            was profiled.
        optimizer_arguments: arguments of the optimizer besides the learning rate, and besides the momentum if the
            optimizer is the one that was profiled.
        clip_norm: maximum norm of all gradients of the model together; by default they are not clipped.
        seed: seed of the weights, of the order of the data, and of dropout.
        weights: safetensors file with the weights to start from, by their names in the module; by default those that
            the factory gives the model.
        evaluate_every: steps between two evaluations on held-out data, with one after the last step too; by default
            no data is held out.
        evaluate_samples: number of held-out samples to evaluate on, drawn with the seed; by default all that the data
            set itself holds out or, if it holds out none, a tenth of it, which is then not trained on.
        checkpoint: folder for checkpoints.
        checkpoint_every: steps between two checkpoints, with one after the last step too; by default 100.
        keep: number of checkpoints to keep, the newest ones; by default 3.
        resume: continue from the newest checkpoint, if there is one, whatever plan it was made under; options of
            training, evaluation and checkpoints that are not given are those that it was made with.
        replan: if devices are lost, plan for the others and continue from the newest checkpoint. Lost are those in
            `without`, the last ones if the job has fewer processes or this machine fewer devices than the plan uses,
            and those of this machine's ranks that die or hang. The result covers the steps since the last plan.
        without: names of devices that are lost, with `replan`.
        timeout_s: seconds that a rank may wait for another before the run ends.
        report_every: steps between two reports of losses and times. For a report the ranks wait for their devices,
            which then run out of queued work. By default 1 on CPUs, on GPUs as many as take half a second, at most 50.
            It does not change results, but signals, and losses that are not finite, are noticed only at a report.
        tensorboard: folder for TensorBoard's scalars of every step and evaluation.

    Raises:
        BapipeError: a value is of another type or out of range, or an option lacks another that it needs.
    """

    factory: str | Callable[..., object] | None = None
    arguments: Mapping[str, object] | None = None
    trust_factory: str | None = None

    data: str = "synthetic"
    data_workers: NonNegative | None = None
    buckets: Positive = 1
    augment: bool = False
    skip_unreadable: bool = False

    steps: Positive = 20
    learning_rate: NonNegativeFloat | None = None
    learning_rate_schedule: str = "constant"
    warmup_steps: NonNegative = 0
    optimizer: str | None = None
    optimizer_arguments: Mapping[str, object] = field(default_factory=dict)
    clip_norm: float | None = None
    seed: Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)] = 0
    weights: Path | None = None

    evaluate_every: Positive | None = None
    evaluate_samples: Positive | None = None

    checkpoint: Path | None = None
    checkpoint_every: Positive | None = None
    keep: Positive | None = None
    resume: bool = False

    replan: bool = False
    without: tuple[str, ...] = ()
    timeout_s: Timeout = 600.0

    report_every: Positive | None = None
    tensorboard: Path | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "checkpoint", "tensorboard"):  # which may be given as strings
            if isinstance(getattr(self, name), str | PathLike):
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.optimizer_arguments is None:
            object.__setattr__(self, "optimizer_arguments", {})
        check_fields(self)
        if self.learning_rate_schedule not in LR_SCHEDULES:
            raise BapipeError(
                f"no schedule of the learning rate '{self.learning_rate_schedule}': want {', '.join(LR_SCHEDULES)}"
            )
        check_clip_norm(self.clip_norm)
        if self.evaluate_samples is not None and self.evaluate_every is None:
            raise BapipeError("`evaluate_samples` needs `evaluate_every`, the steps between two evaluations")
        for name in ("resume", "replan"):
            if getattr(self, name) and self.checkpoint is None:
                raise BapipeError(f"`{name}` needs `checkpoint`, the folder to continue from")
        for name in ("checkpoint_every", "keep"):
            if getattr(self, name) is not None and self.checkpoint is None:
                raise BapipeError(f"`{name}` needs `checkpoint`, the folder for checkpoints: else none is written")
        if self.without and not self.replan:
            raise BapipeError(f"`without` {', '.join(self.without)} goes with `replan`")

    def evaluates_after(self, steps: int) -> bool:
        """Returns whether the model is evaluated after `steps` steps."""
        every = self.evaluate_every
        return every is not None and (steps % every == 0 or steps == self.steps)

    def checkpoint_after(self, steps: int) -> bool:
        """Returns whether a checkpoint is written after `steps` steps."""
        every = self.checkpoint_every or DEFAULT_CHECKPOINT_EVERY
        return self.checkpoint is not None and (steps % every == 0 or steps == self.steps)

    @property
    def num_kept(self) -> int:
        """How many checkpoints are kept, the newest ones."""
        return self.keep or DEFAULT_KEEP

    def pauses_after(self, steps: int) -> bool:
        """Returns whether all ranks wait for their devices after `steps` steps, whatever is reported."""
        return steps == self.steps or self.checkpoint_after(steps) or self.evaluates_after(steps)

    def learning_rate_at(self, step: int, learning_rate: float) -> float:
        """Returns the learning rate of a step, counted from 0; `learning_rate` is that after the warm-up."""
        if step < self.warmup_steps:
            return learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return learning_rate * LR_SCHEDULES[self.learning_rate_schedule](progress)

    def optimizer_for(self, settings: Settings) -> tuple[str, dict[str, object]]:
        """Returns the class of `torch.optim` to train with and its arguments besides the learning rate.

        `settings` are those of the plan's profile, whose optimizer is the default.
        """
        name, profiled = (self.optimizer or settings.optimizer).lower(), OPTIMIZERS.get(settings.optimizer)
        # `sgd` is also the class of SGD with momentum.
        is_same_class = profiled is not None and name == profiled.torch_class.lower()
        rule = profiled if is_same_class else OPTIMIZERS.get(name)
        if rule is None:
            return name, dict(self.optimizer_arguments)
        return rule.torch_class.lower(), {**rule.arguments, **self.optimizer_arguments}


LR_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
}
"""By name, the factor of the learning rate as a function of the share of steps after the warm-up that are done."""
