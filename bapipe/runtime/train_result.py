"""What a pipelined run measured, beside what its plan promised."""

from dataclasses import dataclass
from statistics import mean, median

from bapipe.schedules.table import Action
from bapipe.simulator.timeline import Timeline

WARM_UP_STEPS = 2
"""Steps left out of the typical step time, as long as others are left: memory is first touched, links first used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A step that is done.

    Attributes:
        loss: the mean over the mini-batch, before the update.
        step_ns: of its slowest rank.
        bubble: the share of it that ranks were idle.
        learning_rate: of its update.
        as_planned: whether its samples have the sizes that the plan is for; else they are smaller.
        devices: names of the plan's devices that ran, in rank order.
        peak_bytes: of each of them, the most memory its stages have taken so far; None where the system does not tell.
    """

    step: int
    loss: float
    step_ns: int
    bubble: float
    learning_rate: float
    as_planned: bool
    devices: tuple[str, ...]
    peak_bytes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How the model does on data that it is not trained on.

    Attributes:
        steps: how many were done when it was evaluated.
        loss: the mean over the samples.
        metrics: (name, value), such as the share of samples in ("top-1", 0.9), or a score in ("BLEU", 23.5).
        elapsed_ns: how long it took.
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
        losses, step_ns: of each step, in order; a step's time is its slowest rank's, from a common start.
        as_planned: of each step, whether its samples have the sizes that the plan is for; else they are smaller.
        devices: names of the plan's devices that ran, in rank order.
        peak_bytes: of each of them, the most memory its stages took; None where the system does not tell.
        timeline: of the last step.
        order: what each of them ran in the last step, in order.
        evaluations: those that were asked for, in order.
    """

    losses: tuple[float, ...]
    step_ns: tuple[int, ...]
    as_planned: tuple[bool, ...]
    devices: tuple[str, ...]
    peak_bytes: tuple[int | None, ...]
    timeline: Timeline
    order: tuple[tuple[Action, ...], ...]
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def typical_step_ns(self) -> int:
        """The median step after the warm-up, of those whose samples have the sizes that the plan is for, if any."""
        steps = list(zip(self.step_ns, self.as_planned, strict=True))
        late = steps[WARM_UP_STEPS:] or steps[-1:]
        return int(median([ns for ns, planned in late if planned] or [ns for ns, _ in late]))

    @property
    def mean_step_ns(self) -> int:
        """The mean step after the warm-up, whatever the sizes of its samples."""
        return int(mean(self.step_ns[WARM_UP_STEPS:] or self.step_ns[-1:]))
