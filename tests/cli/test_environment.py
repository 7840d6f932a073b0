"""Streams that are closed and sizes that are none do not end a command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bapipe.cli.environment import forget_wrong_sizes
from bapipe.formats.codec import write
from tests.builders import chain
from tests.explorer.page_data import data_of


def test_with_closed_streams_a_command_writes_its_file_and_nothing_else_into_it(tmp_path: Path) -> None:
    write(tmp_path / "profile.json", chain([1, 2]))
    closed = 'exec "$0" -m bapipe show profile.json --html page.html <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", closed, sys.executable], cwd=tmp_path, timeout=120)
    assert done.returncode == 0
    page = (tmp_path / "page.html").read_bytes()
    assert page.startswith(b"<!DOCTYPE html>")
    assert len(data_of(page)["model"]["layers"]) == 2


@pytest.mark.parametrize("size", ["²", "٣", "0", "-1", "9" * 5000, "wide", ""])
def test_a_size_that_is_none_is_forgotten(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", size)
    forget_wrong_sizes()
    assert (os.environ.get("COLUMNS"), os.environ.get("LINES")) == ("80", None)


def test_commands_have_their_options_where_python_removes_docstrings() -> None:
    """The help of `bapipe run` is made of them."""
    shown = subprocess.run([sys.executable, "-OO", "-m", "bapipe", "run", "--help"], capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--lr-schedule" in shown.stdout
