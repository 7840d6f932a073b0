"""Losses and times of several steps, read together."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapipe.errors import BapipeError, RunFailed
from bapipe.training import step_reports
from bapipe.training.checkpoint.manifest import Position
from bapipe.training.data.loader import Batch
from bapipe.training.step_reports import MAX_STEPS, StepReports
from bapipe.training.train_config import TrainConfig

MS = 10**6


class Clock:
    """Stamps are milliseconds that it is given."""

    def __init__(self) -> None:
        self.stamps: list[int] = []

    def stamp(self) -> object:
        return self.stamps.pop(0)

    def length_ns(self, start: Any, end: Any) -> int:
        return int(end - start) * MS


class Run:
    """Reports of one rank, on a device that has not computed a loss before it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, every: int | None) -> None:
        self.log: list[str] = []
        self.clock = Clock()
        self.losses: Iterator[float] = map(float, range(100, 1000))
        self.pipeline = SimpleNamespace(start_step=self._start_step, busy_ns=lambda: 2 * MS, peak_bytes=lambda: 5)
        rank: Any = SimpleNamespace(device=torch.device(kind, 0), stop_signal=15, size=1)
        monkeypatch.setattr(step_reports, "clock_for", lambda device: self.clock)
        monkeypatch.setattr(step_reports, "barrier", lambda: self.log.append("all ranks are here"))
        self.reports = StepReports(self.pipeline, rank, ("gpu0",), every, self._load_again)  # type: ignore[arg-type]
        self.reports._of_every_rank = lambda row: [list(row)]  # type: ignore[method-assign]
        self.loaded = Batch((), None, Position(), None)
        self.num_steps = 0

    def start(self, begin_ms: int, end_ms: int, data_ms: int = 0) -> None:
        self.clock.stamps = [begin_ms, end_ms]
        batch = Batch((), None, Position(step=self.num_steps + 1), None)
        self.reports.start(self.num_steps, 0.1, batch, Position(step=self.num_steps), data_ms * MS)
        self.num_steps += 1

    def _start_step(self, *inputs: object, target: object, bucket: object) -> object:
        self.log.append("starts")
        return SimpleNamespace(read=self._read)

    def _read(self) -> float:
        self.log.append("reads")
        return next(self.losses)

    def _load_again(self, before: Position) -> Batch:
        self.log.append(f"loads step {before.step}")
        return self.loaded


def test_nothing_waits_for_the_device_before_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the third step's 20 ms for its data, the device had work for all but 3 ms."""
    run = Run(monkeypatch, "cuda", 3)
    for begin_ms, end_ms, data_ms, due in ((0, 10, 7, False), (10, 22, 5, False), (25, 35, 20, True)):
        run.start(begin_ms, end_ms, data_ms)
        assert run.reports.are_due == due
    assert run.log == ["all ranks are here", "starts", "starts", "starts"]
    reports, stop_signal = run.reports.collect()
    assert run.log[4:] == ["reads"] * 3
    assert [(r.step, r.loss, r.step_ns, r.data_ns) for r in reports] == [
        (0, 100, 10 * MS, 7 * MS), (1, 101, 12 * MS, 0), (2, 102, 10 * MS, 3 * MS),
    ]  # fmt: skip
    assert {(r.bubble, r.peak_bytes) for r in reports} == {(0.8, (5,))}
    assert stop_signal == 15
    run.start(0, 1)
    assert run.log[7:] == ["all ranks are here", "starts"]


@pytest.mark.parametrize(("kind", "step_ms", "every"), [("cuda", 20, 25), ("cuda", 1, MAX_STEPS), ("cuda", 900, 1), ("cpu", 20, 1)])  # fmt: skip
def test_gpus_report_about_twice_a_second(monkeypatch: pytest.MonkeyPatch, kind: str, step_ms: int, every: int) -> None:
    run = Run(monkeypatch, kind, None)
    run.start(0, step_ms)
    assert run.reports.are_due
    run.reports.collect()
    for _ in range(every):
        assert not run.reports.are_due
        run.start(0, step_ms)
    assert run.reports.are_due


def test_a_loss_that_is_not_finite_is_of_its_own_step_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(pipeline: object, names: object, batch: Batch, loss: float, step: int) -> RunFailed:
        return RunFailed(f"{loss} at {step}, {'loaded again' if batch is run.loaded else f'up to {batch.after.step}'}")

    monkeypatch.setattr(step_reports, "loss_not_finite", told)
    for losses, message in (
        ([1.0, float("nan"), float("nan")], "nan at 1, loaded again"),
        ([1.0, 2.0, float("inf")], "inf at 2, up to 3"),
    ):
        run = Run(monkeypatch, "cuda", 3)
        run.losses = iter(losses)
        for _ in losses:
            run.start(0, 1)
        with pytest.raises(RunFailed, match=f"^{message}$"):
            run.reports.collect()
        assert [line for line in run.log if "loads" in line] == ["loads step 1"] * ("again" in message)


def test_reports_lie_a_step_apart_at_least() -> None:
    with pytest.raises(BapipeError, match=r"^`report_every` is 0: want at least 1$"):
        TrainConfig(report_every=0)
    config = TrainConfig(steps=10, evaluate_every=4)
    assert [steps for steps in range(1, 11) if config.pauses_after(steps)] == [4, 8, 10]
