"""TensorBoard files contain the reported values."""

import errno
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.io import gfile

from bapipe.errors import BapipeError, RunFailed
from bapipe.training.tensorboard import tensorboard_writer
from bapipe.training.train_result import Evaluation, StepReport


def report(step: int, loss: float) -> StepReport:
    return StepReport(
        step=step,
        loss=loss,
        step_ns=4 * 10**8,
        data_ns=10**8,
        bubble=0.25,
        learning_rate=0.5,
        as_planned=True,
        devices=("cpu0", "cpu1"),
        peak_bytes=(2**20, None),
    )


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_scalars(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "board"
    with tensorboard_writer(folder, 32) as writer:
        for step in range(3):
            writer.write_step(report(step, 4.0 - step))
        writer.write_evaluation(
            Evaluation(steps=2, num_samples=7, loss=1.5, metrics=(("top-1", 0.75), ("BLEU", 12.5)), elapsed_ns=1)
        )
    assert scalars(folder) == {
        "loss": [(1, 4.0), (2, 3.0), (3, 2.0)],
        "samples_per_s": [(1, 64.0), (2, 64.0), (3, 64.0)],
        "learning_rate": [(1, 0.5), (2, 0.5), (3, 0.5)],
        "bubble": [(1, 0.25), (2, 0.25), (3, 0.25)],
        "peak_bytes/cpu0": [(1, 2.0**20), (2, 2.0**20), (3, 2.0**20)],
        "held_out/loss": [(2, 1.5)],
        "held_out/top-1": [(2, 0.75)],
        "held_out/BLEU": [(2, 12.5)],
    }


def test_repeated_steps_count_once(tmp_path: Path) -> None:
    for losses in ({0: 4.0, 1: 3.0, 2: 9.0}, {1: 3.5, 2: 2.5}):
        with tensorboard_writer(tmp_path, 32) as writer:
            for step, loss in losses.items():
                writer.write_step(report(step, loss))
    assert scalars(tmp_path)["loss"] == [(1, 4.0), (2, 3.5), (3, 2.5)]


def test_steps_that_another_plan_repeats_count_once(tmp_path: Path) -> None:
    with tensorboard_writer(tmp_path, 32) as writer:
        for step, loss in ((0, 4.0), (1, 3.0), (2, 9.0), (1, 3.5), (2, 2.5)):
            writer.write_step(report(step, loss))
    assert scalars(tmp_path)["loss"] == [(1, 4.0), (2, 3.5), (3, 2.5)]


def test_a_run_that_resumes_with_an_evaluation_keeps_the_scalars_of_that_step(tmp_path: Path) -> None:
    evaluation = Evaluation(steps=2, num_samples=7, loss=1.5, metrics=(), elapsed_ns=1)
    with tensorboard_writer(tmp_path, 32) as writer:
        for step, loss in {0: 4.0, 1: 3.0, 2: 9.0}.items():
            writer.write_step(report(step, loss))
    with tensorboard_writer(tmp_path, 32) as writer:
        writer.write_evaluation(evaluation)
        writer.write_step(report(2, 2.5))
    found = scalars(tmp_path)
    assert found["loss"] == [(1, 4.0), (2, 3.0), (3, 2.5)]
    assert found["held_out/loss"] == [(2, 1.5)]


def test_a_full_disk_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gfile.LocalFileSystem, "_write", fill)
    with pytest.raises(RunFailed) as caught, tensorboard_writer(tmp_path, 32) as writer:
        writer.write_step(report(0, 4.0))
    assert str(caught.value) == f"{tmp_path}: TensorBoard's files cannot be written: No space left on device"
    assert capfd.readouterr().err == ""


def test_nothing_is_written_if_nothing_is_reported(tmp_path: Path) -> None:
    with tensorboard_writer(tmp_path, 32):  # as on the other ranks of a torchrun job
        pass
    assert list(tmp_path.iterdir()) == []


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BapipeError) as error, tensorboard_writer(tmp_path / "file" / "board", 32):
        pass
    assert str(error.value) == f"{tmp_path / 'file' / 'board'}: cannot hold TensorBoard's files: Not a directory"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BapipeError) as error, tensorboard_writer(tmp_path, 32):
        pass
    assert str(error.value) == (
        "`tensorboard` needs the package tensorboard, which is not installed: pip install tensorboard"
    )
