"""Runs commands in processes of their own that have the modules of most commands from the start: importing takes longest."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.forkserver import SERVER


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command has ended with, named as by `subprocess`."""

    returncode: int | None
    stdout: str
    stderr: str


def run_command(arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str], timeout_s: float) -> Done:
    """Runs `bapipe` with some arguments in a folder."""
    with TemporaryDirectory() as name:
        files = Path(name) / "stdout", Path(name) / "stderr"
        process = SERVER.Process(target=_run, args=(arguments, folder, dict(environment), files))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{arguments} took longer than {timeout_s} s")
        said, errors = (file.read_text() for file in files)
        return Done(returncode=process.exitcode, stdout=said, stderr=errors)


def _run(arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str], files: tuple[Path, Path]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.argv = ["bapipe", *arguments]
    from bapipe.cli import main  # not in the process of the tests

    main()
