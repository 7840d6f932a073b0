"""What is shown of long work where nobody can see a line change."""

import math
import time

import pytest

from bapipe.cli import printing, progress
from bapipe.planner.compute.deadline import Compiling


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, in a list of one."""
    now = [0.0]
    monkeypatch.setattr("bapipe.cli.progress.time.monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_status_is_a_line_every_two_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.status("planning") as update:
        for seconds, name in ((1, "gpipe"), (3, "1f1b"), (4, "zb-h1"), (7, "zb-v")):
            clock[0] = seconds
            update(f"planning: {name}")
    assert capsys.readouterr().err.splitlines() == ["planning: 1f1b", "planning: zb-v"]


def test_a_search_says_that_its_code_is_compiled_meanwhile(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.status("planning") as update:
        for seconds, num_threads in ((3, 1), (6, 0)):
            clock[0] = seconds
            monkeypatch.setattr(Compiling, "num_threads", num_threads)
            update("planning")
    assert capsys.readouterr().err.splitlines() == [
        "planning (compiling its code, once after an installation)",
        "planning",
    ]


def test_one_plan_is_no_plans(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.planning_status() as show:
        for num_simulated in (1, 2):
            clock[0] += 3
            show(num_simulated, 182_445_000, 181_636_000)
    assert capsys.readouterr().err.splitlines() == [
        "planning: 1 plan simulated, best 182 ms, lower bound 181 ms, gap 0.45%",
        "planning: 2 plans simulated, best 182 ms, lower bound 181 ms, gap 0.45%",
    ]


def test_without_a_terminal_a_bar_is_a_line_every_ten_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.parts_bar() as show:
        for done in range(30):
            clock[0] = done
            show(done, 30, f"part {done}")
    assert capsys.readouterr().err.splitlines() == [
        "profiling part 11: 11 of 30",
        "profiling part 22: 22 of 30",
    ]


def test_a_part_that_takes_long_is_named_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENT_S", 0.05)
    seen, end_s = "", time.monotonic() + 30
    with progress.parts_bar() as show:
        for told, wanted in ((False, "profiling\n"), (True, "profiling times: 0 of 3\n")):
            if told:
                show(0, 3, "times")
            while seen.count(wanted) < 2 and time.monotonic() < end_s:
                time.sleep(0.01)
                seen += capsys.readouterr().err
    assert list(dict.fromkeys(seen.splitlines())) == ["profiling", "profiling times: 0 of 3"]


def test_work_that_says_nothing_is_named_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENT_S", 0.05)
    latest, seen, end_s = ["explaining"], "", time.monotonic() + 30
    with progress._Lines(0.05).shown_while_silent(lambda: latest[-1]):
        while seen.count("explaining") < 2 and time.monotonic() < end_s:
            time.sleep(0.01)
            seen += capsys.readouterr().err
        latest.append("and more")
        while "and more" not in seen and time.monotonic() < end_s:
            time.sleep(0.01)
            seen += capsys.readouterr().err
    lines = seen.splitlines()
    assert lines[:2] == ["explaining"] * 2
    assert lines[-1] == "and more"


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    printing.show_json({"loss": math.nan, "all": (1, [math.inf, 0.5]), "name": "é"})
    assert capsys.readouterr().out == '{"loss": null, "all": [1, [null, 0.5]], "name": "\\u00e9"}\n'
