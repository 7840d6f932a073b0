"""What a training run measures and reports."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

from bapipe.schedules.table import Action
from bapipe.simulator.timeline import Timeline

WARM_UP_STEPS = 2
"""Steps left out of the typical step time if there are more: they touch memory and use links for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step.

    Attributes:
        loss: mean over the mini-batch, before the update.
        step_ns: time of the slowest rank.
        data_ns: time before the step in which the ranks waited for its samples; not part of `step_ns`.
        bubble: share of the step that ranks were idle; of steps that are reported together, that of the last one.
        learning_rate: learning rate of the update.
        as_planned: whether the samples have the sizes that the plan is for; else they are smaller.
        devices: names of the plan's devices that ran, in rank order.
        peak_bytes: per device, the peak memory of its stages so far; None if the system does not report it.
    """

    step: int
    loss: float
    step_ns: int
    data_ns: int
    bubble: float
    learning_rate: float
    as_planned: bool
    devices: tuple[str, ...]
    peak_bytes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Loss and metrics on data that the model is not trained on.

    Attributes:
        steps: number of training steps before it.
        loss: mean over the targets, by their weights, if the loss is one such mean; else over the samples.
        metrics: (name, value), such as the share of samples in ("top-1", 0.9), or a score in ("BLEU", 23.5).
        elapsed_ns: time that the evaluation took.
    """

    steps: int
    num_samples: int
    loss: float
    metrics: tuple[tuple[str, float], ...]
    elapsed_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run measured.

    Attributes:
        losses, step_ns: per step, in order; a step's time is its slowest rank's, from a common start.
        data_ns: per step, the time before it in which the ranks waited for its samples.
        as_planned: per step, whether the samples have the sizes that the plan is for; else they are smaller.
        devices: names of the plan's devices that ran, in rank order.
        peak_bytes: per device, the peak memory of its stages; None if the system does not report it.
        timeline: measured timeline of the last step.
        order: per device, the actions of the last step in the order in which they ran.
        evaluations: in order.
    """

    losses: tuple[float, ...]
    step_ns: tuple[int, ...]
    data_ns: tuple[int, ...]
    as_planned: tuple[bool, ...]
    devices: tuple[str, ...]
    peak_bytes: tuple[int | None, ...]
    timeline: Timeline
    order: tuple[tuple[Action, ...], ...]
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def typical_step_ns(self) -> int:
        """The median step time after the first steps, over those with the plan's sample sizes, if any."""
        steps = list(zip(self.step_ns, self.as_planned, strict=True))
        late = steps[WARM_UP_STEPS:] or steps[-1:]
        return int(median([ns for ns, planned in late if planned] or [ns for ns, _ in late]))

    @property
    def mean_step_ns(self) -> int:
        """The mean step time after the first steps, whatever the sizes of the samples."""
        return int(mean(self.step_ns[WARM_UP_STEPS:] or self.step_ns[-1:]))

    @property
    def mean_data_ns(self) -> int:
        """The mean time before a step in which the ranks waited for its samples, after the first steps."""
        return int(mean(self.data_ns[WARM_UP_STEPS:] or self.data_ns[-1:]))


OnStep = Callable[[StepReport], None]

OnEvaluation = Callable[[int, int, Evaluation | None], None]
"""(held-out samples done, number of held-out samples, the evaluation when all are done)"""
