"""Scalars of a training run for TensorBoard."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bapipe.errors import BapipeError, RunFailed
from bapipe.training.train_result import Evaluation, StepReport


class TensorBoardWriter:
    """Writes the reports of steps and evaluations to a folder; its file is created at the first report."""

    def __init__(self, folder: Path, minibatch_size: int) -> None:
        self._folder, self._minibatch_size = folder, minibatch_size
        self._writer: Any = None
        self._last = 0  # step that was written

    def write_step(self, report: StepReport) -> None:
        """Writes loss, throughput with the wait for data, learning rate, bubble, and the peak memory of each device."""
        scalars: dict[str, float] = {
            "loss": report.loss,
            "samples_per_s": self._minibatch_size * 1e9 / (report.data_ns + report.step_ns),
            "learning_rate": report.learning_rate,
            "bubble": report.bubble,
        }
        for device, peak in zip(report.devices, report.peak_bytes, strict=True):
            if peak is not None:
                scalars[f"peak_bytes/{device}"] = peak
        if report.step < self._last:  # training continues from a checkpoint under another plan
            self.close()
            self._writer = None
        self._last = report.step + 1
        self._write(scalars, report.step + 1, purge_step=report.step + 1)

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Writes loss and metrics on held-out data."""
        scalars = {"loss": evaluation.loss, **dict(evaluation.metrics)}
        # A run that resumes may begin with an evaluation, of a step whose own scalars the earlier run has written.
        held_out = {f"held_out/{name}": value for name, value in scalars.items()}
        self._write(held_out, evaluation.steps, purge_step=evaluation.steps + 1)

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):  # what could not be written has been reported
                self._writer.close()

    def _write(self, scalars: dict[str, float], steps: int, *, purge_step: int) -> None:
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                # A run resumed from a checkpoint repeats the steps after it: purge what the earlier run wrote of them.
                self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, steps)
            self._writer.flush()
        except OSError as error:
            raise RunFailed(f"{self._folder}: TensorBoard's files cannot be written: {error.strerror}") from None


@contextmanager
def _quiet_writer_thread() -> Iterator[None]:
    """Hides the traceback of an error in TensorBoard's thread, which is also raised in the thread that writes."""
    before = threading.excepthook

    def show(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            before(failed)

    threading.excepthook = show
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def tensorboard_writer(folder: Path, minibatch_size: int) -> Iterator[TensorBoardWriter]:
    """Yields a writer, and closes it.

    Raises:
        BapipeError: tensorboard is not installed, or the folder cannot be made.
    """
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise BapipeError(
            "`tensorboard` needs the package tensorboard, which is not installed: pip install tensorboard"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BapipeError(f"{folder}: cannot hold TensorBoard's files: {error.strerror}") from None
    writer = TensorBoardWriter(folder, minibatch_size)
    try:
        with _quiet_writer_thread():
            yield writer
    finally:
        writer.close()
