"""The command that runs all large planning problems knows its cases, and goes on where it was stopped."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.planner.nasnet import LARGE_CELLS, MOBILE_CELLS, nasnet
from benchmarks.planner.targets import Outcome, cases, known_outcomes, main


def test_every_case_has_a_name_of_its_own(tmp_path: Path) -> None:
    names = [name for name, _ in cases(tmp_path)]
    assert len(set(names)) == len(names)
    assert {"looped/zb-v", "throughput/nasnet-large on 16", "random/large 9900", "random/small 4500"} <= set(names)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    done = Outcome(name="a", ms=3.0)
    (tmp_path / "results").write_bytes(msgspec.json.encode(done) + b'\n{"name":"b","m')
    assert known_outcomes(tmp_path / "results") == {"a": done}
    assert known_outcomes(tmp_path / "none") == {}


def test_known_cases_are_not_run_again_and_a_missed_target_is_the_exit_code(tmp_path: Path) -> None:
    done = Outcome(name="looped/zb-v", gap=0.5, missed="a gap of 8%")
    (tmp_path / "results").write_bytes(msgspec.json.encode(done))
    words = [str(tmp_path), "--results", str(tmp_path / "results"), "--only", "zb-v"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner.targets", *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "a gap of 8%" in ended.stdout
    assert ended.stderr == ""


def test_cases_are_listed_without_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["targets", str(tmp_path), "--list", "--only", "zb-v"])
    main()
    assert capsys.readouterr().out == "looped/zb-v\n"
    monkeypatch.setattr("sys.argv", ["targets", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith("error: want --results FILE, or --list\n")


def test_layers_of_nasnet_read_what_earlier_ones_make() -> None:
    for cells in (MOBILE_CELLS, LARGE_CELLS):
        inputs = nasnet(cells)
        read = {tensor for tensors in inputs for tensor in tensors}
        assert all(int(tensor[1:]) < i for i, tensors in enumerate(inputs) for tensor in tensors if tensor != "x")
        assert {f"l{i}" for i in range(len(inputs) - 1)} <= read
