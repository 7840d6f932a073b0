"""The thread that writes checkpoints, as it would be on a GPU."""

import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bapipe.errors import BapipeError, RunFailed
from bapipe.runtime import copy_streams
from bapipe.training import train_rank
from bapipe.training.checkpoint import tensor_files, writer
from bapipe.training.checkpoint.folder import list_checkpoints
from bapipe.training.checkpoint.manifest import MANIFEST, read_manifest
from bapipe.training.checkpoint.tensor_files import FileDigest, write_tensors
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import StepReport
from tests.multiprocess.fault_cases import points, quiet
from tests.training.checkpoint.cases import example, go, only_rank, plan

NO_SPACE = "[Errno 28] No space left on device"


def test_the_thread_that_writes_waits_on_the_gpu_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPU 0, where threads begin, each rank would make a context of half a gigabyte."""
    gpu, real = torch.device("cuda", 1), copy_streams.copied_to_host
    seen: list[tuple[str, object]] = []

    def noted(event: str, value: object = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            seen.append((event, value))

    def copied(tensors: Any, first: Any, stream: Any) -> Any:
        assert stream.device == gpu
        return real(tensors, first, None)

    monkeypatch.setattr(writer, "copy_stream", lambda device: SimpleNamespace(device=gpu))
    monkeypatch.setattr(writer, "copied_to_host", copied)
    monkeypatch.setattr(copy_streams.HostCopy, "wait", lambda copy: noted("wait"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: noted("set", device))
    go(tmp_path / "run", 2)
    assert seen == [("set", gpu), ("wait", None)]


def test_a_rank_copies_what_it_writes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replica writes need not take page-locked memory of this rank."""
    owners, copied = writer.owners_of, list[set[str]]()

    def owners_of(specs: Any) -> dict[str, int]:
        return {name: int("weight" in name) for name in owners(specs)}

    def noted(tensors: Any, *rest: Any) -> copy_streams.HostCopy:
        copied.append(set(tensors))
        return copy_streams.copied_to_host(tensors, *rest)

    monkeypatch.setattr(writer, "owners_of", owners_of)
    monkeypatch.setattr(writer, "copied_to_host", noted)
    go(tmp_path / "run", 2)
    assert "model/0.bias" in copied[0]
    assert not any("weight" in name for name in copied[0])


def failing(times: int) -> Any:
    """Returns a `write_tensors` that finds the disk full for some times, after half of the file is there."""
    left = [times]

    def write(path: Path, tensors: Any) -> FileDigest:
        if left[0] == 0:
            return write_tensors(path, tensors)
        left[0] -= 1
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    return write


def test_a_checkpoint_that_cannot_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "write_tensors", failing(1))
    monkeypatch.setattr(train_rank, "AGAIN_S", 0.01)
    with caplog.at_level(logging.WARNING):
        go(tmp_path, 4)
    assert [read_manifest(path).position.step for path in list_checkpoints(tmp_path)] == [2, 4]
    assert caplog.messages == [
        f"rank 0 (cpu0) could not write the checkpoint of 2 steps: OSError: {NO_SPACE}; it is tried again in 0.01 s"
    ]


def test_a_rank_that_writes_for_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def sync(path: Path) -> None:
        time.sleep(0.3)
        tensor_files.sync(path)

    monkeypatch.setattr(writer, "sync", sync)
    monkeypatch.setattr(writer, "_MEET_S", 0.05)
    monkeypatch.setattr(writer, "_SLOW_S", 0.1)
    with caplog.at_level(logging.WARNING):
        go(tmp_path, 2)
    assert caplog.messages == ["rank 0 (cpu0): still writing a checkpoint after 0.1 s; see whether the disk answers"]


def test_a_disk_that_is_lost_after_the_rename_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(28, "No space left on device")]

    def sync(path: Path) -> None:
        if path == tmp_path and failures:
            raise failures.pop()
        tensor_files.sync(path)

    monkeypatch.setattr(writer, "sync", sync)
    monkeypatch.setattr(train_rank, "AGAIN_S", 0.01)
    go(tmp_path, 4)
    assert [read_manifest(path).position.step for path in list_checkpoints(tmp_path)] == [2, 4]


def test_a_run_whose_checkpoint_fails_twice_ends_before_the_next_one_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train on for what may be hours, of which nothing is kept; what was written of it is removed."""
    monkeypatch.setattr(writer, "write_tensors", failing(-1))
    monkeypatch.setattr(train_rank, "AGAIN_S", 0.01)
    steps: list[int] = []

    def on_step(report: StepReport) -> None:
        steps.append(report.step)
        time.sleep(0.05)

    config = TrainConfig(steps=1000, checkpoint=tmp_path)
    monkeypatch.setattr(TrainConfig, "checkpoint_after", lambda config, steps: steps in (3, 1000))
    with only_rank(), pytest.raises(RunFailed) as caught:
        train(plan(), quiet, points(), config, example=example(), on_step=on_step)
    dist.destroy_process_group()
    assert str(caught.value) == f"rank 0 (cpu0) could not write the checkpoint of 3 steps: OSError: {NO_SPACE}"
    assert steps[-1] < 50
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize("num_missing", [1, None])
def test_a_checkpoint_without_part_of_a_file_does_not_get_its_name(tmp_path: Path, num_missing: int | None) -> None:
    go(tmp_path, 2)
    manifest = read_manifest(list_checkpoints(tmp_path)[0])
    unfinished = list_checkpoints(tmp_path)[0].rename(tmp_path / ".unfinished-2")
    path = unfinished / "rank-0.safetensors"
    if num_missing is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-num_missing])
    with pytest.raises(BapipeError, match=r"rank-0.safetensors is not there as it was written"):
        writer.finish_checkpoint(tmp_path, manifest)
    assert list_checkpoints(tmp_path) == ()


def test_a_checkpoint_counts_only_when_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors, the manifest and the entries of the folder before it is renamed; the outer folder's after that."""
    calls: list[tuple[str, str]] = []
    real = os.rename

    def renamed(source: Any, target: Any) -> None:
        calls.append(("rename", Path(source).name))
        real(source, target)

    monkeypatch.setattr(
        os, "fsync", lambda handle: calls.append(("sync", Path(f"/proc/self/fd/{handle}").readlink().name))
    )
    monkeypatch.setattr(os, "rename", renamed)
    go(tmp_path / "run", 2)
    (at,) = (index for index, (call, _) in enumerate(calls) if call == "rename")
    unfinished = calls[at][1]
    before = [name for _, name in calls[:at]]
    assert before[-1] == unfinished
    assert any(name.endswith(".safetensors") for name in before)
    assert any(name.startswith(f".{MANIFEST}.") for name in before)  # under the name that it has until it is whole
    assert calls[at + 1] == ("sync", "run")
