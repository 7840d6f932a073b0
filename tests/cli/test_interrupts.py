"""What the command line says when Ctrl-C ends it."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bapipe
from bapipe.cli import main
from bapipe.cli.plan import _say_what_more_time_could_do
from bapipe.formats.certificate import certify
from bapipe.formats.plan import Plan, with_certificate
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.plan import plan_cached
from tests.builders import chain, devices

ROOT = str(Path(bapipe.__file__).parents[1])
"""The folder of the package."""


def test_a_proof_that_is_complete_is_not_said_to_be_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bapipe.write(tmp_path / "p.json", chain([1, 2, 3]))
    bapipe.write(tmp_path / "c.json", devices(2))
    search = plan_cached

    def interrupted_when_done(*given: Any, **named: Any) -> Plan:
        made = search(*given, **named)
        signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bapipe.cli.plan.plan_cached", interrupted_when_done)
    monkeypatch.setattr("sys.argv", ["bapipe", "plan", "p.json", "--cluster", "c.json", "--minibatch-size", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 0
    assert "proven optimal over" in said.out
    assert "the search was not cut short: its proof was complete before" in said.err
    assert "so far" not in said.err
    assert "the search was ended" not in said.err


def test_an_interrupted_command_says_what_is_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt("the measurements at micro-batch size 1 are stored")

    monkeypatch.setattr("bapipe.cli.profile.profile_model", interrupted)
    monkeypatch.setattr("sys.argv", ["bapipe", "profile", "vgg16", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (130, "")
    assert " ".join(said.err.split()) == "interrupted; the measurements at micro-batch size 1 are stored"


def test_what_more_time_could_do_is_said_with_the_reason_for_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    made = bapipe.make(chain([1, 2, 3]), devices(2), minibatch_size=4)
    step_ns = made.prediction.step_ns
    loose = with_certificate(made, certify(step_ns, step_ns * 10_000 // 10_045, "some plans"))
    _say_what_more_time_could_do(loose, Deadline(0.0))
    at_limit = capsys.readouterr().err
    assert "at most 0.46% slower than the fastest one" in at_limit
    assert "with a longer --time-limit it may find" in at_limit
    stopped = Deadline(None)
    stopped.stop()
    _say_what_more_time_could_do(loose, stopped)
    interrupted = capsys.readouterr().err
    assert "the search was interrupted: " in interrupted
    assert "--time-limit" not in interrupted


LATE = """
import os, signal, sys, threading
from unittest.mock import Mock
from bapipe import cli
from bapipe.__main__ import main
from bapipe.errors import Stopped

def stop_again(kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
    kill(pid, number)

class AtTheEnd:
    def __del__(self, stop_again=stop_again):
        stop_again()

if sys.argv[1] == "python":
    sys.at_the_end = AtTheEnd()
else:
    threading.Thread(target=lambda: (threading.main_thread().join(), stop_again())).start()
cli.app = Mock(side_effect=Stopped(signal.SIGTERM))
main()
"""


@pytest.mark.parametrize("ends", ["python", "threads"])
def test_a_second_signal_while_python_ends_keeps_the_exit_code(ends: str) -> None:
    done = subprocess.run([sys.executable, "-c", LATE, ends], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.split()) == (128 + signal.SIGTERM, ["stopped", "by", "SIGTERM"])


def test_little_is_imported_before_signals_are_handled() -> None:
    """What is imported before is a window in which Ctrl-C is shown as a fault."""
    code = "import sys, bapipe.stop_signals; print(*sorted({'typing', 're', 'difflib'} & {*sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {ROOT!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("\n", "")
