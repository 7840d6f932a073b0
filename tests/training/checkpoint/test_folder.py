"""The folder of checkpoints: the newest whole one is taken, one run writes at a time, leftovers are cleared."""

import errno
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.convert import convert
from bapipe.training.checkpoint.export import export
from bapipe.training.checkpoint.folder import (
    list_checkpoints,
    make_unfinished,
    newest_checkpoint,
    only_writer,
    set_damaged_aside,
)
from bapipe.training.checkpoint.manifest import MANIFEST, checkpoint_name, is_old, read_manifest
from bapipe.training.checkpoint.tensor_files import TensorSpec
from bapipe.training.checkpoint.writer import full_state_dict, owners_of
from tests.training.checkpoint.cases import go


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    go(folder, 6)
    return folder


@pytest.fixture
def kept(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "kept")
    return tmp_path / "kept"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [MANIFEST, "rank-0.safetensors"])
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_damaged(
    kept: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a network disk that is away for a moment, or if the file is another user's."""
    newest = kept / "step-000000006" / name
    real: Any = Path.open

    def opened(path: Path, *mode: str) -> Any:
        if path == newest:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, *mode)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(BapipeError) as caught:
        go(kept, 8)
    assert str(caught.value) == (
        f"{newest}: cannot be read: Stale file handle, so step-000000006 may be whole: make it readable and try again, "
        "or move it elsewhere to take the one before"
    )
    assert len(list_checkpoints(kept)) == 3


def test_a_step_may_be_damaged_twice(kept: Path) -> None:
    newest = list_checkpoints(kept)[-1]
    for _ in range(2):
        set_damaged_aside(kept, 4)
        assert not newest.exists()
        newest.mkdir()
        (newest / "file").write_bytes(b"x")


def test_of_a_damaged_newest_checkpoint_the_one_before_is_taken(
    kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = go(tmp_path / "alone", 8)
    flip(kept / "step-000000006" / "rank-0.safetensors")
    with caplog.at_level(logging.WARNING):
        again = go(kept, 8)
    assert caplog.messages == [
        f"{kept}/step-000000006 is damaged: 'rank-0.safetensors' does not hold what was written; taking step-000000004, "
        "the one before"
    ]
    assert again.losses == alone.losses[4:]
    assert sorted(path.name for path in kept.iterdir()) == [
        "damaged-step-000000006", "step-000000004", "step-000000006", "step-000000008",
    ]  # fmt: skip
    paths = [folder / "step-000000008" for folder in (tmp_path / "alone", kept)]
    want, have = (full_state_dict(path, read_manifest(path)) for path in paths)
    assert want.keys() == have.keys()
    assert all(torch.equal(want[name], have[name]) for name in want)
    assert newest_checkpoint(kept) is not None


def test_several_damaged_ones_are_counted_and_all_are_refused(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    (kept / "step-000000006" / "bapipe.json").unlink()
    (kept / "step-000000004" / "rank-0.safetensors").unlink()
    found = newest_checkpoint(kept)
    assert found is not None
    assert found.path.name == "step-000000002"
    assert caplog.messages[0].endswith("(1 more are damaged); taking step-000000002, the one before")
    assert export(kept, kept / "model.safetensors") == 8
    flip(kept / "step-000000002" / "rank-0.safetensors")
    with pytest.raises(
        BapipeError, match=r"bapipe.json: no such file; \S+/kept has no other checkpoint that is whole$"
    ):
        go(kept, 8)


def holder_of(folder: Path) -> int:
    """Returns a process that holds the lock of a folder."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        with only_writer(folder):
            os.write(sender, b"held")
            signal.pause()
    os.close(sender)
    assert os.read(receiver, 4) == b"held"
    os.close(receiver)
    return pid


def test_one_run_writes_to_a_folder_and_a_killed_one_leaves_no_lock(kept: Path) -> None:
    pid = holder_of(kept)
    try:
        with pytest.raises(BapipeError) as caught:
            go(kept, 8)
        assert str(caught.value) == (
            f"{kept}: the run of process {pid} on {os.uname().nodename} writes its checkpoints here: wait until "
            "it has ended, or name another folder"
        )
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert (kept / ".lock").exists()
    assert len(go(kept, 8).losses) == 2
    assert not (kept / ".lock").exists()


def test_two_threads_of_a_process_are_two_writers(tmp_path: Path) -> None:
    second = only_writer(tmp_path / "kept")
    with only_writer(tmp_path / "kept"), pytest.raises(BapipeError, match=rf"the run of process {os.getpid()} on "):
        second.__enter__()
    with only_writer(tmp_path / "kept"):
        pass


def test_what_a_killed_run_left_unfinished_is_cleared(kept: Path) -> None:
    (kept / ".unfinished-8").mkdir()
    (kept / ".unfinished-8" / "rank-0.safetensors").write_bytes(b"half")
    (kept / "step-notes").mkdir()  # not a checkpoint: neither read nor removed
    go(kept, 8, keep=2)
    assert sorted(path.name for path in kept.iterdir()) == ["step-000000006", "step-000000008", "step-notes"]
    assert [path.name for path in list_checkpoints(kept)] == ["step-000000006", "step-000000008"]


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_that_is_a_link_is_refused_and_not_followed(tmp_path: Path, there: bool) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "from-a-stranger"
    if there:
        victim.write_text("precious")
    folder.mkdir()
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(BapipeError, match=r"\.lock is a link, where bapipe makes a file"):
        convert(folder)
    assert (folder / ".lock").is_symlink()
    assert (victim.read_text() == "precious") if there else not victim.exists()


def test_a_lock_that_is_a_hard_link_is_refused_and_not_written_to(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "from-a-stranger"
    victim.write_text("precious")
    folder.mkdir()
    (folder / ".lock").hardlink_to(victim)
    with pytest.raises(BapipeError, match=r"\.lock is another name of a file elsewhere \(a hard link\)"):
        convert(folder)
    assert victim.read_text() == "precious"


def test_a_lock_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(BapipeError, match="no regular file"), only_writer(tmp_path):
        pass


@pytest.mark.parametrize("name", [".unfinished-8", "step-000000001", "step-000000008"])
def test_links_in_the_folder_are_replaced_and_what_they_point_to_stays(kept: Path, tmp_path: Path, name: str) -> None:
    """The run writes the checkpoint of 8 steps, and removes that of 1 step, older than those it keeps."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in (MANIFEST, "rank-0.safetensors", "rank-1.safetensors"):
        (elsewhere / file).write_text("precious")
    (kept / name).symlink_to(elsewhere)
    go(kept, 8)
    assert [file.read_text() for file in elsewhere.iterdir()] == ["precious"] * 3
    assert not (kept / name).is_symlink()
    newest = newest_checkpoint(kept)
    assert newest is not None
    assert newest.manifest.position.step == 8


def test_an_unfinished_folder_that_cannot_be_cleared_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".unfinished-8").mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    with pytest.raises(FileExistsError):
        make_unfinished(tmp_path, 8)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BapipeError, match=r"^\S+/file/kept: cannot hold checkpoints: Not a directory$"):
        go(tmp_path / "file" / "kept", 2)


def test_each_tensor_is_written_by_the_rank_with_the_least_to_write() -> None:
    spec = TensorSpec(shape=(10,), dtype="float32")
    large = TensorSpec(shape=(100,), dtype="float32")
    owners = owners_of([{"a": large, "b": spec, "c": spec}, {"b": spec, "c": spec, "d": spec}, {"c": spec}])
    assert owners == {"a": 0, "b": 1, "c": 2, "d": 1}


def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(tmp_path: Path) -> None:
    checkpoint = tmp_path / checkpoint_name(2)
    checkpoint.mkdir()
    os.mkfifo(checkpoint / MANIFEST)
    with pytest.raises(BapipeError, match=f"{MANIFEST} is a pipe"):
        newest_checkpoint(tmp_path)
    assert not is_old(checkpoint)
