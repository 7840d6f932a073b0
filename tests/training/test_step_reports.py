"""Losses and times of several steps, read together."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapipe.errors import BapipeError, RunFailed
from bapipe.training import step_reports, train_rank
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


def test_the_ranks_of_a_report_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of 10 ms one rank is busy for 6, this one for 2; a signal to stop that only this one got counts."""
    run = Run(monkeypatch, "cuda", 1)
    other = [6 * MS, 7, 0, 0, 0.0, 10 * MS, 0]  # busy, peak, signal, no loss, step, data
    run.reports._of_every_rank = lambda row: [other, list(row)]  # type: ignore[method-assign]
    run.start(0, 10)
    (report,), stop_signal = run.reports.collect()
    assert (report.bubble, report.loss, report.peak_bytes) == (0.6, 100, (7, 5))
    assert stop_signal == 15


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


@pytest.mark.parametrize(("drawn_ms", "data_ms"), [(8, 0), (12, 2), (30, 9)])
def test_a_batch_that_is_drawn_before_a_report_costs_what_the_device_had_no_work_for(
    monkeypatch: pytest.MonkeyPatch, drawn_ms: int, data_ms: int
) -> None:
    """A rank waits for it 9 ms, until the device is at `drawn_ms`; its step has ended at 10."""
    run = Run(monkeypatch, "cuda", 1)
    run.start(0, 10)
    run.clock.stamps = [max(drawn_ms, 10)]  # a stamp is on the device, after the step
    run.reports.collect(9 * MS)
    waits = []
    for _ in range(2):
        run.start(40, 50)
        ((report,), _) = run.reports.collect()
        waits.append(report.data_ns)
    assert waits == [data_ms * MS, 0]


class Reports:
    """Notes what is asked of it, in place of StepReports."""

    log: list[str]
    are_due = True

    def __init__(self, *_: object) -> None:
        self.step = 0

    def start(self, step: int, _: float, batch: Batch, before: Position, data_ns: int) -> None:
        assert (batch.after.step, before.step) == (step + 1, step)
        self.log.append(f"starts {step}{' with a copy' if batch.target is not None else ''}")
        self.step = step

    def collect(self, ahead_ns: int) -> tuple[tuple[()], int]:
        self.log.append(f"waits for {self.step}")
        return (), 0


@pytest.mark.parametrize(
    ("kind", "log"),
    [
        (
            "cuda",
            "draws 0, starts 0, draws 1, copies 1, waits for 0, starts 1 with a copy, waits for 1, evaluates, "
            "draws 2, starts 2, draws 3, copies 3, waits for 2, starts 3 with a copy, waits for 3, evaluates",
        ),
        (
            "cpu",
            "draws 0, starts 0, waits for 0, draws 1, starts 1, waits for 1, evaluates, "
            "draws 2, starts 2, waits for 2, draws 3, starts 3, waits for 3, evaluates",
        ),
    ],
)
def test_a_gpu_copies_the_next_mini_batch_while_a_report_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, log: str
) -> None:
    seen: list[str] = []

    def draw() -> Iterator[Batch]:
        for step in range(4):
            seen.append(f"draws {step}")
            yield Batch((None,), None, Position(step=step + 1), None)

    def copied_ahead(inputs: tuple[None], target: None) -> tuple[tuple[None], torch.Tensor]:
        seen.append(f"copies {seen[-1].split()[-1]}")
        return inputs, torch.ones(1)

    monkeypatch.setattr(Reports, "log", seen, raising=False)
    monkeypatch.setattr(train_rank, "StepReports", Reports)
    monkeypatch.setattr(train_rank, "_evaluate", lambda *_, **__: seen.append("evaluates"))
    rank: Any = SimpleNamespace(device=torch.device(kind, 0), index=0, enter_step=lambda step: None)
    config = TrainConfig(steps=4, evaluate_every=2)
    job: Any = SimpleNamespace(plan=None, config=config, devices=("gpu0",), learning_rate=0.1)
    pipeline: Any = SimpleNamespace(set_learning_rate=lambda value: None, copied_ahead=copied_ahead)
    validation: Any = object()
    run = train_rank._RankRun(rank=rank, job=job, pipeline=pipeline, writer=None, validation=validation)
    train_rank._train_steps(run, draw(), Position(), None)
    assert ", ".join(seen) == log


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
