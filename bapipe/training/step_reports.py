"""Reports on steps: losses and times stay on the devices until several steps are reported together.

Reading them waits until the devices have done all queued work, so the next step begins with an empty queue. On a GPU
that costs up to a millisecond; on a CPU, which has done its work when a call returns, nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import torch
import torch.distributed as dist

from bapipe.job.groups import barrier
from bapipe.runtime.clock import clock_for
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.training_steps import PendingLoss
from bapipe.training.checkpoint.manifest import Position
from bapipe.training.data.loader import Batch
from bapipe.training.launch.worker import Rank
from bapipe.training.not_finite import loss_not_finite
from bapipe.training.train_result import StepReport

REPORT_NS = 500_000_000
"""About the time between two reports on GPUs, unless the number of steps between them is given."""

MAX_STEPS = 50
"""Most steps between two reports on GPUs, unless their number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StartedStep:
    """A step whose work is queued on this rank's device.

    Attributes:
        before: the position of training before it.
        as_planned: whether the samples have the sizes that the plan is for.
        data_ns: how long this rank waited for its part of the batch.
        loss: None on ranks without the last stage.
        start, end: stamps of the clock.
    """

    step: int
    learning_rate: float
    before: Position
    as_planned: bool
    data_ns: int
    loss: PendingLoss | None
    start: object
    end: object


class StepReports:
    """Starts steps, and reports on them; every rank of the group uses it together with the others."""

    def __init__(
        self,
        pipeline: Pipeline,
        rank: Rank,
        names: tuple[str, ...],
        every: int | None,
        load_again: Callable[[Position], Batch],
    ) -> None:
        """`every` is the number of steps from one report to the next; None chooses it.

        `load_again` returns the mini-batch after a position.
        """
        self._pipeline, self._rank, self._names, self._load_again = pipeline, rank, names, load_again
        self._adapts = every is None and rank.device.type == "cuda"
        self._every = every or 1
        self._clock = clock_for(rank.device)
        self._started: list[_StartedStep] = []
        self._batch: Batch | None = None  # of the last step
        self._late_ns = 0  # by how much a wait for its batch, before a report, delays the next step

    @property
    def are_due(self) -> bool:
        """Whether enough steps have been started for the next reports."""
        return len(self._started) >= self._every

    def start(self, step: int, learning_rate: float, batch: Batch, before: Position, data_ns: int) -> None:
        """Starts a step; the first one after a report begins when all ranks have reached it."""
        if not self._started:
            barrier()
        start = self._clock.stamp()
        loss = self._pipeline.start_step(*batch.inputs, target=batch.target, bucket=batch.bucket)
        self._started.append(
            _StartedStep(
                step=step,
                learning_rate=learning_rate,
                before=before,
                as_planned=batch.bucket is None,
                data_ns=self._late_ns + data_ns,
                loss=loss,
                start=start,
                end=self._clock.stamp(),
            )
        )
        self._batch, self._late_ns = batch, 0

    def collect(self, ahead_ns: int = 0) -> tuple[tuple[StepReport, ...], int]:
        """Returns reports on the steps since the last call, and the signal that has asked any rank to stop, or 0.

        `ahead_ns` is how long this rank has just waited for the batch of the next step, while its device had work.

        Raises:
            RunFailed: a loss is not finite.
        """
        steps, self._started = self._started, []
        drawn = self._clock.stamp() if ahead_ns else None
        losses = [None if each.loss is None else each.loss.read() for each in steps]  # waits for the device
        lengths_ns = [self._clock.length_ns(each.start, each.end) for each in steps]
        self._late_ns = min(ahead_ns, self._clock.length_ns(steps[-1].end, drawn)) if ahead_ns else 0
        peak = self._pipeline.peak_bytes()
        row: list[float] = [self._pipeline.busy_ns(), -1 if peak is None else peak]
        row += [self._rank.stop_signal, losses[0] is not None]
        row += [0.0 if loss is None else loss for loss in losses]
        row += [*lengths_ns, *self._data_ns(steps)]
        rows = self._of_every_rank(row)
        num = len(steps)
        means = next(of[4 : 4 + num] for of in rows if of[3])
        steps_ns, data_ns = (
            [int(max(times)) for times in zip(*(of[first : first + num] for of in rows), strict=True)]
            for first in (4 + num, 4 + 2 * num)
        )
        # How long ranks were busy is known only of the last step.
        bubble = 1 - sum(of[0] for of in rows) / (len(rows) * steps_ns[-1])
        reports = [
            StepReport(
                step=each.step,
                loss=mean,
                step_ns=step_ns,
                data_ns=waited_ns,
                bubble=bubble,
                learning_rate=each.learning_rate,
                as_planned=each.as_planned,
                devices=self._names,
                peak_bytes=tuple(None if of[1] < 0 else int(of[1]) for of in rows),
            )
            for each, mean, step_ns, waited_ns in zip(steps, means, steps_ns, data_ns, strict=True)
        ]
        self._check_finite(steps, means)
        if self._adapts:
            self._every = min(max(REPORT_NS * num // max(sum(steps_ns), 1), 1), MAX_STEPS)
        return tuple(reports), int(max(of[2] for of in rows))

    def _data_ns(self, steps: Sequence[_StartedStep]) -> list[int]:
        """Returns by how much its data delayed each step: waiting costs nothing while the device has other work."""
        idle_ns = [self._clock.length_ns(before.end, after.start) for before, after in pairwise(steps)]
        return [steps[0].data_ns, *(min(each.data_ns, ns) for each, ns in zip(steps[1:], idle_ns, strict=True))]

    def _of_every_rank(self, row: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(row, dtype=torch.float64, device=self._rank.device)
        everyone = [torch.empty_like(own) for _ in range(self._rank.size)]
        dist.all_gather(everyone, own)
        return [values.tolist() for values in everyone]

    def _check_finite(self, steps: Sequence[_StartedStep], losses: Sequence[float]) -> None:
        for each, loss in zip(steps, losses, strict=True):
            if not isfinite(loss):
                assert self._batch is not None
                is_last = each is steps[-1]
                batch = self._batch if is_last else self._load_again(each.before)
                raise loss_not_finite(self._pipeline, self._names, batch, loss, each.step)
