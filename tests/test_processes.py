"""Local processes send messages, report how they ended, and end with their context."""

import multiprocessing
import os
import profile
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from bapipe.errors import BapipeError
from bapipe.module_path import current_folder_importable
from bapipe.processes import ChildError, LocalProcess, end_with, local_processes, receive

Send = Callable[[object], None]


def greet(index: int, send: Send, word: str) -> None:
    send((index, word, os.environ.get("BAPIPE_TEST")))


def fail(index: int, send: Send) -> None:
    try:
        raise ValueError("the cause\nand more lines")
    except ValueError as error:
        raise RuntimeError("a long account") from error


def kill_itself(index: int, send: Send) -> None:
    sys.stderr.write("first\nlast\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


class Unpicklable:
    """Data whose own code fails when it is pickled, as that of HDF5 files does."""

    def __reduce__(self) -> str:
        raise RuntimeError("an open file")


class Cloudpickle:
    """In the place of the package: it pickles functions, but not such data either."""

    @staticmethod
    def dumps(job: object) -> bytes:
        raise TypeError("cannot pickle an open file")


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (None, r"\(RuntimeError: an open file\): .* or script, or install cloudpickle; "),
        (Cloudpickle, r"\(TypeError: cannot pickle an open file\): .* or script; "),
    ],
)
def test_data_that_cannot_be_pickled_are_refused(
    package: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", package)
    refused = pytest.raises(BapipeError, match=rf"^what processes run cannot be sent to them {reason}")
    with refused, local_processes(greet, 1, (Unpicklable(),), folder=tmp_path):
        pass


def streams(index: int, send: Send) -> None:
    send(sys.stdout is not None)


def sleep(index: int, send: Send) -> None:
    send(os.getpid())
    time.sleep(1000)


def imported(index: int, send: Send, *names: str) -> None:
    send([getattr(import_module(name), "__file__", None) for name in names])


def collect(processes: tuple[LocalProcess, ...]) -> list[tuple[int, object]]:
    messages = []
    while any(process.is_open for process in processes):
        for process, message in receive(processes, 0.1):
            messages += [(process.index, message)] if process.is_open else []
    return sorted(messages, key=lambda message: message[0])


def test_each_process_gets_its_index_the_arguments_and_the_environment(tmp_path: Path) -> None:
    environment = {"BAPIPE_TEST": "set"}
    with local_processes(greet, 2, ("hello",), folder=tmp_path, environment=environment, grace_s=10) as processes:
        assert collect(processes) == [(0, (0, "hello", "set")), (1, (1, "hello", "set"))]
    assert [process.popen.returncode for process in processes] == [0, 0]


def test_files_of_the_current_folder_do_not_take_the_place_of_pythons_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is searched for the module of a factory, installed packages still come behind it."""
    for name in ("profile", "random", "types", "bapipe", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')")
    for name in ("own", "safetensors"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with current_folder_importable():
        with local_processes(imported, 1, ("profile", "own", "safetensors"), folder=tmp_path / "empty") as processes:
            received = collect(processes)
        assert sys.path[0] == str(tmp_path)
    assert str(tmp_path) not in sys.path
    assert received == [(0, [profile.__file__, f"{tmp_path}/own.py", f"{tmp_path}/safetensors.py"])]


def test_an_exception_is_reported_by_its_first_cause_in_one_line(tmp_path: Path) -> None:
    with local_processes(fail, 1, (), folder=tmp_path) as processes:
        assert collect(processes) == [(0, ChildError("ValueError: the cause"))]
        assert processes[0].exit_code(10) == 1


def test_a_killed_process_gives_its_signal_and_the_end_of_its_log(tmp_path: Path) -> None:
    with local_processes(kill_itself, 1, (), folder=tmp_path, quiet=True) as processes:
        assert collect(processes) == []
        assert processes[0].exit_code(10) == -signal.SIGKILL
        assert processes[0].why_ended() == "it was killed by SIGKILL, as a system out of memory does: last"


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_process_ends_if_its_parent_ended_before_it_had_started(is_alive: bool) -> None:
    """As workers do that load data: they import torch for seconds, and another process is their parent by then."""
    parent = os.getpid() if is_alive else os.getppid()
    process = multiprocessing.get_context("spawn").Process(target=end_with, args=(parent,))
    process.start()
    process.join(60)
    assert process.exitcode == (0 if is_alive else 1)


def test_processes_end_with_the_context(tmp_path: Path) -> None:
    processes: tuple[LocalProcess, ...] = ()
    try:
        with local_processes(sleep, 2, (), folder=tmp_path, grace_s=1000) as processes:
            while not receive(processes, 0.1):
                pass
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [process.popen.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_processes_that_do_not_end_share_their_grace(tmp_path: Path) -> None:
    with local_processes(sleep, 4, (), folder=tmp_path, grace_s=0.5) as processes:
        began = time.monotonic()
    assert 0.5 <= time.monotonic() - began < 1.5
    assert [process.popen.returncode for process in processes] == [-signal.SIGKILL] * 4


UNGUARDED = """
import tempfile
from pathlib import Path
from bapipe.processes import local_processes
from tests.test_processes import collect, greet
print("script")
with tempfile.TemporaryDirectory() as folder, local_processes(greet, 2, ("a",), folder=Path(folder)) as processes:
    print(collect(processes))
"""

OWN_FUNCTION = """
import tempfile
from pathlib import Path
from bapipe.processes import local_processes
from tests.test_processes import collect

def double(index, send, number):
    send(2 * number)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, local_processes(double, 1, (4,), folder=Path(folder)) as processes:
        print(collect(processes))
"""


CLOSED_STREAMS = """
import sys, tempfile
from pathlib import Path
from bapipe.cli.environment import open_closed_streams
from bapipe.processes import local_processes
from tests.test_processes import collect, streams

if sys.argv[1] == "command":
    open_closed_streams()
elif sys.argv[1] == "other":
    taken = open("script.py")  # has the number of stdout, and is no stream of other processes
with tempfile.TemporaryDirectory() as folder, local_processes(streams, 1, (), folder=Path(folder)) as processes:
    sys.stderr.write(f"{collect(processes)} {processes[0].exit_code(10)}")
"""


@pytest.mark.parametrize(
    ("program", "closed", "is_open"),
    [("command", ">&-", True), ("other", ">&-", False), ("daemon", "<&-", True), ("daemon", "<&- >&-", False)],
)
def test_a_program_with_closed_streams_starts_processes(
    program: str, closed: str, is_open: bool, tmp_path: Path
) -> None:
    """What is opened for the processes must not have the numbers of these streams, as it has with them closed."""
    (tmp_path / "script.py").write_text(CLOSED_STREAMS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = ["sh", "-c", f'exec "$0" script.py {program} {closed}', sys.executable]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.stderr == f"[(0, {is_open})] 0"


@pytest.mark.parametrize(
    ("script", "output"),
    [(UNGUARDED, "script\n[(0, (0, 'a', None)), (1, (1, 'a', None))]\n"), (OWN_FUNCTION, "[(0, 8)]\n")],
    ids=["a script without a guard", "a function of the script"],
)
def test_from_a_script(script: str, output: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == (output, "")


def test_a_script_that_would_start_itself_again_says_what_to_do(tmp_path: Path) -> None:
    """Its processes import it, as it defines their function."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "script.py").write_text(
        "from pathlib import Path\n"
        "from bapipe.processes import local_processes, receive\n"
        "def work(index, send): pass\n"
        "with local_processes(work, 1, (), folder=Path('empty')) as (one,):\n"
        "    print(receive([one], 60)[0][1].text)\n"
    )
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, timeout=120)
    assert done.stdout == (
        "BapipeError: the processes that a script starts import it if it defines the model, and would profile and run, "
        'too: put what it does, beside defining functions and classes, below `if __name__ == "__main__":`\n'
    )
