"""Compiled code that is kept in the cache."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bapipe.planner.compute import compiled
from tests import ROOT

SCRIPT = """
import sys
from pathlib import Path
from bapipe.planner.compute import compiled as module

@module.compiled
def total(first, second):
    return first + second

print(total(1, 2), total(0.5, 1.0))
"""


def run(folder: Path) -> str:
    path = folder / "adds.py"
    path.write_text(SCRIPT)
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(folder: Path) -> dict[Path, bytes]:
    kept = sorted((folder / "cache").rglob("*.nb?"))
    return {path: path.read_bytes() for path in kept}


def test_damaged_code_is_compiled_anew(tmp_path: Path) -> None:
    """A byte changed anywhere, half of a file, none of it: numba would fail, or run what it reads."""
    assert run(tmp_path) == "3 1.5\n"
    whole = files(tmp_path)
    assert len(whole) == 3  # an index, and the code for each of two types
    assert run(tmp_path) == "3 1.5\n"
    assert files(tmp_path) == whole  # which was read
    rng = random.Random(0)
    for path, content in whole.items():
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 0xFF
        for damaged in (bytes(flipped), content[: len(content) // 2], b""):
            path.write_bytes(damaged)
            assert run(tmp_path) == "3 1.5\n"
    assert run(tmp_path) == "3 1.5\n"
    whole = files(tmp_path)
    assert run(tmp_path) == "3 1.5\n"
    assert files(tmp_path) == whole


def test_a_disk_that_is_full_when_code_is_kept_is_one_warning(tmp_path: Path) -> None:
    """Both functions run; whether numba writes an index or a function, the system has no space left."""
    script = """
import errno, os, sys
from bapipe.planner.compute import compiled as module

def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

module._CheckedFile._open_for_write = full

@module.compiled
def total(first, second):
    return first + second

print(total(1, 2), total(0.5, 1.0))
"""
    path = tmp_path / "full.py"
    path.write_text(script)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "3 1.5\n"), done.stderr
    assert done.stderr.count("compiled code is not kept") == 1
    assert "No space left on device; free some space, or set XDG_CACHE_HOME to another folder" in done.stderr


def test_code_is_kept_for_one_version_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba sees a change in the module of a function that Python calls alone, not in what that calls."""
    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path)
    with_compiled = [path for path in (ROOT / "bapipe").rglob("*.py") if "compute.compiled import" in path.read_text()]
    assert len(with_compiled) > 10
    assert {path.parent for path in with_compiled} == set(compiled.SOURCES)
    kept = compiled._code_folder.__wrapped__()
    copies = tuple(tmp_path / "sources" / folder.name for folder in compiled.SOURCES)
    for folder, copy in zip(compiled.SOURCES, copies, strict=True):
        shutil.copytree(folder, copy)
    monkeypatch.setattr(compiled, "SOURCES", copies)
    assert compiled._code_folder.__wrapped__() == kept
    for path in with_compiled:
        changed = tmp_path / "sources" / path.parent.name / path.name
        changed.write_text(path.read_text() + "# changed\n")
        assert compiled._code_folder.__wrapped__() != kept
        changed.write_text(path.read_text())


@pytest.mark.parametrize("newest_s", [1000, 2**33])
def test_code_of_old_versions_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest_s: int) -> None:
    """Also where a clock that was ahead wrote them: those of this version stay."""
    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path)
    for age in range(6):
        old = tmp_path / "compiled" / f"version{age}"
        old.mkdir(parents=True)
        (old / "code.nbc").write_bytes(b"x")
        os.utime(old, (newest_s - age, newest_s - age))
    folder = Path(compiled._code_folder.__wrapped__())
    left = {path.name for path in (tmp_path / "compiled").iterdir()}
    assert left == {folder.name, "version0", "version1"}
