"""The ranks of a job read each file of a checkpoint once on each host, and find the same, whatever one of them reads."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, local
from typing import Any

import msgspec
import pytest

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.folder import newest_checkpoint
from bapipe.training.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    encode_manifest,
    file_name,
    read_manifest,
    stored_tensors,
)
from bapipe.training.checkpoint.read_together import read_together
from bapipe.training.checkpoint.tensor_files import FileDigest, file_digest, read_tensors, write_tensors
from tests.training.checkpoint.cases import go

HOSTS = ("a", "a", "b", "b")
"""Of the ranks."""

NUM_FILES = 3


class Ranks:
    """Ranks of a job as threads; each reads a folder of its own, and notes which files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._own, self._barrier = local(), Barrier(len(HOSTS), timeout=60)
        self._passed: list[Any] = [None] * len(HOSTS)
        self.read: list[tuple[str, str]] = []  # (host, file)
        where = "bapipe.training.checkpoint"
        monkeypatch.setattr(f"{where}.read_together.gathered", self._gathered)
        monkeypatch.setattr(f"{where}.read_together.dist.get_rank", lambda: self._own.rank)
        monkeypatch.setattr(f"{where}.read_together.this_host", lambda: HOSTS[self._own.rank])
        monkeypatch.setattr(f"{where}.manifest.file_digest", self._digest)

    def _gathered(self, value: Any) -> list[Any]:
        self._passed[self._own.rank] = value
        self._barrier.wait()
        of_all = list(self._passed)
        self._barrier.wait()
        return of_all

    def _digest(self, path: Path) -> FileDigest:
        self.read.append((HOSTS[self._own.rank], path.name))
        return file_digest(path)

    def call(self, read: Callable[[Path], object], folders: tuple[Path, ...]) -> list[object]:
        """Returns what `read` gives on each rank, or its error."""

        def of_rank(rank: int) -> object:
            self._own.rank = rank
            try:
                return read(folders[rank])
            except BapipeError as error:
                return type(error), str(error)

        with ThreadPoolExecutor(len(HOSTS)) as threads:
            return list(threads.map(of_rank, range(len(HOSTS))))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with checkpoints of 2 and 4 steps, each in several files."""
    go(tmp_path / "kept", 4)
    for checkpoint in sorted((tmp_path / "kept").glob("step-*")):
        manifest = read_manifest(checkpoint)
        tensors = dict(read_tensors([checkpoint / name for name in manifest.files], stored_tensors(manifest)))
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        files = {}
        for index in range(NUM_FILES):
            own = {name: copies[name] for name in sorted(copies)[index::NUM_FILES]}
            files[file_name(index)] = write_tensors(checkpoint / file_name(index), own)
        (checkpoint / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=files)))
    return tmp_path / "kept"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_each_file_is_read_once_on_each_host(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = kept / "step-000000004"
    want, ranks = read_manifest(newest), Ranks(monkeypatch)
    assert ranks.call(read_together, (newest,) * len(HOSTS)) == [want] * len(HOSTS)
    assert sorted(ranks.read) == [(host, file_name(index)) for host in "ab" for index in range(NUM_FILES)]


@pytest.mark.parametrize("damaged", range(NUM_FILES))
def test_a_damaged_file_is_found_by_all_and_the_checkpoint_before_is_taken(
    kept: Path, monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    newest, before = kept / "step-000000004", kept / "step-000000002"
    flip(newest / file_name(damaged))
    ranks = Ranks(monkeypatch)
    text = f"{newest} is damaged: '{file_name(damaged)}' does not hold what was written"
    assert ranks.call(read_together, (newest,) * len(HOSTS)) == [(DamagedCheckpoint, text)] * len(HOSTS)
    found = ranks.call(lambda folder: newest_checkpoint(folder, read=read_together), (kept,) * len(HOSTS))
    assert [getattr(one, "path", one) for one in found] == [before] * len(HOSTS)


def test_a_host_that_reads_another_disk_verifies_what_it_reads(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, other = kept / "step-000000004", tmp_path / "elsewhere" / "step-000000004"
    shutil.copytree(newest, other)
    want, on_disks, ranks = read_manifest(newest), (newest, newest, other, other), Ranks(monkeypatch)
    assert ranks.call(read_together, on_disks) == [want] * len(HOSTS)
    flip(other / file_name(1))
    text = f"{other} is damaged: '{file_name(1)}' does not hold what was written"
    assert ranks.call(read_together, on_disks) == [(DamagedCheckpoint, text)] * len(HOSTS)
    flip(other / file_name(1))
    (other / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(want, seed=7)))
    text = (
        f"`checkpoint` {kept}: rank 2 finds another checkpoint there than rank 0: name a folder on a disk that all "
        "hosts share"
    )
    found = ranks.call(read_together, on_disks)
    assert found[0] == found[1] == (BapipeError, text)
    assert found[2] == found[3] == (BapipeError, text.replace(str(kept), str(other.parent)))
