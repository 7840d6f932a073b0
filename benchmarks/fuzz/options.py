"""Gives every option of every command absurd values: each must end in seconds, with an answer or one line.

    python -m benchmarks.fuzz.options [--command plan] [--limit 20]

The options and their order come from the command line itself. Every call is a process of its own, forked from this one.
"""

import gc
import io
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

import typer

from bapipe.cli import app, main
from bapipe.cli.lazy_group import COMMANDS
from bapipe.formats.codec import write
from bapipe.planner.inputs.clusters import homogeneous_cluster
from bapipe.planner.plan import plan
from benchmarks import parser_of
from benchmarks.fuzz.group_kinds import small_profile

NUMBERS = ("0", "-1", "nan", "inf", "-inf", "1e30", "1" + "0" * 30, "9" * 5000, "1e-320", "0x10", "١٢")
TEXTS = ("", " ", "x" * 100_000, "\x1b[31m\u202e💥", "<script>", "a=b=c", "=", ",", ":", "a:", "--", "../../etc/passwd")
PLACES = ("folder", "socket", "pipe", "zero", "full", "missing/file", "unreadable", "n" * 300)
VALUES = (*NUMBERS, *TEXTS, *PLACES)

REQUIRED = {
    "profile": ["missing:model"],
    "import": ["table.csv", "--batch-size", "4"],
    "estimate": ["profile.json", "--split", "tensor:2", "--cluster", "cluster.json"],
    "cluster": ["--like", "profile.json"],
    "plan": ["profile.json", "--cluster", "cluster.json", "--minibatch-size", "8"],
    "compare": ["profile.json", "--cluster", "cluster.json", "--minibatch-size", "8"],
    "edit": ["plan.json", "--profile", "profile.json"],
    "explore": ["profile.json", "--cluster", "cluster.json", "--minibatch-size", "8", "--json"],
    "simulate": ["plan.json", "profile.json"],
    "show": ["plan.json"],
    "run": ["plan.json", "--steps", "1"],
    "doctor": [],
    "export": ["folder"],
    "convert-checkpoint": ["folder"],
}
"""What each command is given besides; none of these starts a training or a page."""

HEAVY = ("bapipe.training.run", "bapipe.profiler.profile", "bapipe.cli.run", "torch.distributed.pipelining")
"""Modules that commands would take seconds to import."""

EXIT_CODES = (0, 1, 2, 3)


def calls(command: str) -> Iterator[list[str]]:
    """Yields the arguments of every call: each option with each value, and each value in the place of an argument."""
    given = REQUIRED[command]
    for parameter in typer.main.get_command(app).commands[command].params:  # type: ignore[attr-defined]
        option = parameter.opts[-1]
        if option.startswith("-") and not parameter.is_flag and option != "--help":
            yield from ([command, *given, option, value] for value in VALUES)
    for place, argument in enumerate(given):
        if not argument.startswith("-"):
            yield from ([command, *given[:place], value, *given[place + 1 :]] for value in VALUES)


def prepare(folder: Path) -> None:
    """Writes the files that commands are given, and places that are no files."""
    profile = small_profile()
    cluster = homogeneous_cluster({profile.device.kind: profile}, 2)
    write(folder / "profile.json", profile)
    write(folder / "cluster.json", cluster)
    write(folder / "plan.json", plan(profile, cluster, minibatch_size=8))
    (folder / "table.csv").write_text("layer,forward_ms,backward_ms,activation_bytes,parameter_bytes\na,1,2,3,4\n")
    (folder / "folder").mkdir()
    (folder / "unreadable").write_text("{}")
    (folder / "unreadable").chmod(0)
    os.mkfifo(folder / "pipe")
    for name in ("zero", "full"):  # by links: a command that replaced its output would end the device itself
        (folder / name).symlink_to(f"/dev/{name}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))


def fault(arguments: Sequence[str], folder: Path, limit_s: int) -> str:
    """Returns what is wrong with how a call ended; nothing if it ended well. Runs in a process of its own."""
    os.chdir(folder)
    os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "120"}
    sys.argv, said, code = ["bapipe", *arguments], io.StringIO(), 0
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(10 * limit_s)
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]
    if time.process_time() > limit_s:
        return f"took {time.process_time():.0f} s of processor time"
    # Usage errors (code 2) have the line with the usage, and a hint, before the error.
    if code not in EXIT_CODES or (code == 1 and said.getvalue().strip().count("\n")) or "Traceback" in said.getvalue():
        return f"code {code}, said {said.getvalue()[:300]!r}"
    return ""


def forked_fault(arguments: Sequence[str], folder: Path, limit_s: int) -> str:
    """Returns the fault of a call that runs in a forked process with limits."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (4 * limit_s, 4 * limit_s))
        os.write(writing, fault(arguments, folder, limit_s).encode(errors="backslashreplace")[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return said or (f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "")


def shortened(arguments: Sequence[str]) -> str:
    """Returns a call for a report."""
    return " ".join(repr(text if len(text) < 40 else f"{text[:20]}... ({len(text)})") for text in arguments)


def check(command: str, folder: Path, limit_s: int) -> tuple[int, list[str]]:
    """Returns the number of calls of a command, and what is wrong with them."""
    chosen = list(calls(command))
    found = [
        f"{shortened(arguments)}: {said}" for arguments in chosen if (said := forked_fault(arguments, folder, limit_s))
    ]
    replaced = [name for name in ("zero", "full") if not (folder / name).is_symlink()]
    replaced += [] if (folder / "pipe").is_fifo() else ["pipe"]
    return len(chosen), found + [f"{name} was replaced" for name in replaced]


def run_all() -> int:
    """Prints a line for each command and each fault; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--command", choices=[*COMMANDS])
    parser.add_argument("--limit", type=int, default=5, help="seconds of processor time for a call")
    given = parser.parse_args()
    for module in HEAVY:  # once, before processes are forked
        import_module(module)
    gc.freeze()
    faults = 0
    for command in [given.command] if given.command else COMMANDS:
        with tempfile.TemporaryDirectory() as place:
            prepare(Path(place))
            number, found = check(command, Path(place), given.limit)
        print(f"{command}: {number} calls, {len(found)} faults", *found, sep="\n  ", flush=True)
        faults += len(found)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(run_all())
