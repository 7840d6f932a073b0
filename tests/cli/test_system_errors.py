"""What the system refuses ends a command with one line, and leaves nothing half written."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest

from bapipe import cli
from bapipe.cli.system_errors import system_error_text
from bapipe.errors import BapipeError
from bapipe.formats.codec import write
from bapipe.user_folders import user_folder
from tests.builders import devices
from tests.random_profiles import random_profile


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files: allow more open files (ulimit -n)"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/plan.json"),
            "/data/plan.json: No space left on device: free some space, or write elsewhere; TMPDIR names the folder for "
            "temporary files",
        ),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError("nothing is known"), "nothing is known"),
        (MemoryError(), "out of memory: allow more memory (ulimit -v), or use less"),
    ],
)
def test_an_error_of_the_system_says_what_to_try(error: OSError | MemoryError, text: str) -> None:
    assert system_error_text(error) == text


@pytest.mark.parametrize("text", ["can't start new thread", "Resource temporarily unavailable"])
def test_no_thread_that_can_be_started_is_one_line(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", Mock(side_effect=RuntimeError(text)))
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    error = " ".join(capsys.readouterr().err.split())
    assert error == f"error: {text}: allow more processes (ulimit -u, or the limit of the container)"
    monkeypatch.setattr(cli, "app", Mock(side_effect=RuntimeError("a fault of this program")))
    with pytest.raises(RuntimeError, match="a fault of this program"):
        cli.main()


def raised_from(error: Exception, cause: Exception) -> Exception:
    """Returns an error that was raised while another one was handled."""
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ImportError("/numba/_helperlib.so: failed to map segment from shared object"),
        raised_from(
            OSError("Could not find/load shared object file 'libllvmlite.so': the permissions may be incorrect"),
            OSError("/llvmlite/libllvmlite.so: failed to map segment from shared object"),
        ),
        raised_from(
            ImportError("numpy was not found"), ImportError("libblas.so: cannot allocate memory in static TLS")
        ),
    ],
)
def test_a_library_without_memory_for_it_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", Mock(side_effect=error))
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err == "error: out of memory: allow more memory (ulimit -v), or use less\n"


def test_other_imports_that_fail_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", Mock(side_effect=ImportError("cannot import name 'x'")))
    with pytest.raises(ImportError, match="cannot import name"):
        cli.main()


def only_empty_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize(
    ("stdout", "home", "limit", "code", "said"),
    [
        ("/dev/null", None, only_empty_files, 1, "error: plan.json: cannot be written: File too large"),
        ("/dev/full", None, None, 1, "error: the output cannot be written: No space left on device: send it elsewhere"),
        ("/dev/null", "/proc", None, 0, "WARNING: the plan is not cached: /proc/.cache/bapipe: cannot be made"),
    ],
    ids=["a full disk", "a full disk behind stdout", "a home folder that cannot be written"],
)
def test_a_plan_where_the_system_refuses_to_write(
    tmp_path: Path, stdout: str, home: str | None, limit: Callable[[], None] | None, code: int, said: str
) -> None:
    write(tmp_path / "profile.json", random_profile(Random(5), 6))
    write(tmp_path / "cluster.json", devices(2, memory_bytes=10**6, latency_ns=5))
    environment = os.environ | ({"XDG_CACHE_HOME": str(tmp_path)} if home is None else {"HOME": home})
    if home is not None:
        environment.pop("XDG_CACHE_HOME", None)
    with open(stdout, "w") as out:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "bapipe",
                "plan",
                "profile.json",
                "--cluster",
                "cluster.json",
                "--minibatch-size",
                "8",
            ],
            cwd=tmp_path,
            env=environment,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            preexec_fn=limit,
        )
    assert done.returncode == code
    assert any(line.startswith(said) for line in done.stderr.splitlines()), done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "plan.json").exists() is (limit is None)
    assert not list(tmp_path.glob(".plan*"))


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(
        BapipeError, match=r"^this user has no home folder: set XDG_CACHE_HOME to a folder that can be written$"
    ):
        user_folder("XDG_CACHE_HOME", ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert user_folder("XDG_CACHE_HOME", ".cache") == Path("/cache/bapipe")
