"""Has the parts done by a process of their own, which ends if one takes too long, and sums up."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bapipe.errors import BapipeError
from bapipe.processes import ChildError, LocalProcess, local_processes, receive
from bapipe.torch_device import local_device
from benchmarks.gpu.parts import Part, parts_of, result_path, results, save, work
from benchmarks.gpu.summary import summary

_START_S = 120.0
"""How long the process that does the parts may take to start."""


def run(folder: Path, device_name: str, seconds: float, *, is_small: bool, prefixes: Sequence[str]) -> int | str:
    """Does the parts that have no result yet, of those whose names begin with one of `prefixes`.

    Returns an exit code: 0 if all of them have a result, or an error.
    """
    try:
        device = local_device(device_name)
    except BapipeError as error:
        return str(error).replace("`device`", "--device")
    folder.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + seconds
    parts = [part for part in parts_of(folder, device, is_small=is_small) if part.name.startswith(tuple(prefixes))]
    while (missing := _missing(folder, parts)) and time.monotonic() < end_s:
        _do(folder, device_name, missing, end_s, is_small)
    (folder / "summary.md").write_text(summary(results(folder)))
    num = len(_missing(folder, parts))
    print(f"{len(parts) - num} of {len(parts)} parts have a result; {folder / 'summary.md'}")
    return 1 if num else 0


def _missing(folder: Path, parts: list[Part]) -> list[Part]:
    return [part for part in parts if not result_path(folder, part.name).exists()]


def _do(folder: Path, device_name: str, parts: list[Part], end_s: float, is_small: bool) -> None:
    """Has parts done, until one fails or the time is over."""
    names, limits = [part.name for part in parts], {part.name: part.limit_s for part in parts}
    arguments = (folder.absolute(), device_name, is_small, names)
    with TemporaryDirectory() as temporary, local_processes(work, 1, arguments, folder=Path(temporary)) as (worker,):
        running, started_s = "", time.monotonic()
        while worker.is_open:
            limit_s = limits.get(running, _START_S)
            remaining_s = min(started_s + limit_s, end_s) - time.monotonic()
            received = receive([worker], max(remaining_s, 0.0))
            if not received:
                if time.monotonic() < end_s:
                    save(folder, running or names[0], [{"error": f"not done after {limit_s:.0f} s"}])
                return
            message = received[0][1]
            if isinstance(message, str):
                running, started_s = message, time.monotonic()
                print(running, file=sys.stderr, flush=True)
            else:
                _note_end(folder, running or names[0], worker, message)


def _note_end(folder: Path, running: str, worker: LocalProcess, message: object) -> None:
    """Writes why a worker has ended as the result of the part that it was doing, unless that has one."""
    if isinstance(message, ChildError):
        save(folder, running, [{"error": message.text}])
    elif not result_path(folder, running).exists():
        save(folder, running, [{"error": f"its process ended with code {worker.exit_code(10.0)}"}])
