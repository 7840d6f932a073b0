"""How a model is trained besides its plan: optimizer, learning rate over the steps, clipping, seed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bapipe.errors import BapipeError

MOMENTUM = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How to train.

    Attributes:
        steps: optimizer steps in all, those before a checkpoint included.
        optimizer: a class of `torch.optim`, in any case.
        optimizer_arguments: what it is made with besides the learning rate; SGD has momentum 0.9 where it is empty.
        schedule: a name in `LR_SCHEDULES`: what becomes of the learning rate after the warm-up.
        warmup_steps: steps in which it grows evenly to its full value.
        clip_norm: the most that the norm of all gradients together may be; None does not look at it.
        autocast: the type that `torch.autocast` computes in; None computes in the model's own.
        threads: compute threads of a rank on a CPU.
        evaluate_every: steps after which the model is evaluated on held-out data, and so it is after the last; None
            does not, and holds no data out.
        evaluate_samples: how many held-out samples are looked at, where there are more; else all, or a tenth of data
            that holds none out by itself.

    Raises:
        BapipeError: a value out of range, or an unknown schedule.
    """

    steps: int
    learning_rate: float = 0.01
    optimizer: str = "sgd"
    optimizer_arguments: Mapping[str, object] = field(default_factory=dict)
    schedule: str = "constant"
    warmup_steps: int = 0
    clip_norm: float | None = None
    autocast: str | None = None
    threads: int = 1
    seed: int = 0
    evaluate_every: int | None = None
    evaluate_samples: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if self.schedule not in LR_SCHEDULES:
            raise BapipeError(f"no schedule of the learning rate '{self.schedule}': want {', '.join(LR_SCHEDULES)}")
        if self.autocast not in (None, "bfloat16", "float16"):
            raise BapipeError(f"autocast to {self.autocast}: want bfloat16 or float16")
        if self.warmup_steps < 0:
            raise BapipeError(f"a warm-up of {self.warmup_steps} steps: want 0 or more")
        if self.evaluate_every is not None and self.evaluate_every < 1:
            raise BapipeError(f"evaluation every {self.evaluate_every} steps: want 1 or more")
        if self.evaluate_samples is not None and self.evaluate_samples < 1:
            raise BapipeError(f"evaluation of {self.evaluate_samples} samples: want 1 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BapipeError(f"gradients cannot be clipped to a norm of {self.clip_norm}: want more than 0")

    def evaluates_after(self, steps: int) -> bool:
        """Whether the model is evaluated when so many steps are done."""
        every = self.evaluate_every
        return every is not None and (steps % every == 0 or steps == self.steps)

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * LR_SCHEDULES[self.schedule](share)


LR_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: (1.0 + math.cos(math.pi * share)) / 2,
}
"""The part of the learning rate that is left, from the share of the steps after the warm-up that are done."""
