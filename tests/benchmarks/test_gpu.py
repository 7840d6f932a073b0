"""The measurements for a GPU, all of them on a CPU with tiny models; their figures are not looked at here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bapipe.schedules import ALL
from bapipe.schedules.table import check
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import run as run_module
from benchmarks.gpu.correctness import errors_of
from benchmarks.gpu.one_device import serial
from benchmarks.gpu.parts import Part, parts_of, result_path
from benchmarks.gpu.summary import summary
from tests import ROOT
from tests.benchmarks import slow_parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that was measured."""
    path = tmp_path_factory.mktemp("gpu") / "results"
    arguments = ["-m", "benchmarks.gpu", str(path), "--device", "cpu", "--small"]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return path


def test_all_parts_run_on_a_cpu(folder: Path) -> None:
    found = {path.stem: json.loads(path.read_text()) for path in (folder / "results").glob("*.json")}
    assert set(found) == {
        "facts", "correct.gpt2", "two_ranks.host-memory", "layers.gpt2.float32.002", "steps.gpt2.float32"
    }  # fmt: skip
    assert [row["error"] for rows in found.values() for row in rows if "error" in row] == []
    assert len(found["correct.gpt2"]) == 16
    assert len(found["two_ranks.host-memory"]) == 8
    assert all(row["right"] for part in ("correct.gpt2", "two_ranks.host-memory") for row in found[part])
    assert {(row["schedule"], row["stages"]) for row in found["steps.gpt2.float32"]} == {
        ("1f1b", 1), ("1f1b", 2), ("zb-h1", 2)
    }  # fmt: skip
    assert {"0F", "0B"} <= set(found["steps.gpt2.float32"][0]["actions"])
    assert found["layers.gpt2.float32.002"][0]["stash_over"]["requested"] == pytest.approx(1.0, abs=0.02)


def test_the_summary_has_a_table_of_each_kind(folder: Path) -> None:
    text = (folder / "summary.md").read_text()
    assert "16 of 16 are right" in text
    assert text.count("\n## ") == 4
    assert "What failed" not in text


def test_what_is_there_is_not_done_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "_do", lambda *_: pytest.fail("nothing is missing"))
    assert run_module.run(folder, "cpu", 60.0, is_small=True, prefixes=[""]) == 0
    assert "5 of 5 parts have a result" in capsys.readouterr().out


def test_a_part_that_takes_too_long_is_ended_and_the_others_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Part(name=name, run=list, limit_s=1.0) for name in ("sleeps", "dies", "works")]
    monkeypatch.setattr(run_module, "parts_of", lambda *_, is_small: parts)
    monkeypatch.setattr(run_module, "work", slow_parts.work)
    assert run_module.run(tmp_path, "cpu", 120.0, is_small=True, prefixes=[""]) == 0
    errors = {part.name: json.loads(result_path(tmp_path, part.name).read_text())[0].get("error") for part in parts}
    assert errors == {"sleeps": "not done after 1 s", "dies": "its process ended with code 3", "works": None}


def test_only_parts_that_are_named_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Part(name=name, run=list, limit_s=1.0) for name in ("a.one", "a.two", "b.one", "c.one")]
    monkeypatch.setattr(run_module, "parts_of", lambda *_, is_small: parts)
    monkeypatch.setattr(run_module, "work", slow_parts.work)
    assert run_module.run(tmp_path, "cpu", 120.0, is_small=True, prefixes=["a", "c.one"]) == 0
    assert {path.stem for path in (tmp_path / "results").iterdir()} == {"a.one", "a.two", "c.one"}


def test_errors_are_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path), "--device", "cuda:7"])
    with pytest.raises(SystemExit, match="torch finds no device 'cuda:7' on this machine: choose --device cpu"):
        command.main()
    monkeypatch.setattr(command, "NEEDED", ("torch", "no_such_package"))
    with pytest.raises(SystemExit, match="missing packages: no_such_package; install"):
        command.main()
    assert list(tmp_path.iterdir()) == []


def test_what_failed_is_in_the_summary() -> None:
    text = summary({"layers.x.tf32.004": [{"error": "out of memory"}], "correct.x": []})
    assert text == "## What failed\n\n- layers.x.tf32.004: out of memory\n"


def test_all_stages_on_one_device_keep_the_schedule_legal() -> None:
    for name, schedule in ALL.items():
        if name != "fbp-as":
            check(serial(schedule(2, 4)))


def test_the_error_of_a_gradient_that_is_mostly_rounding_is_relative_to_the_others() -> None:
    right = {"layer": torch.tensor([3.0, 4.0]), "tiny": torch.tensor([1e-7])}

    def errors(layer: float, tiny: float) -> dict[str, Any]:
        return errors_of((1.0, {"layer": torch.tensor([3.0, layer]), "tiny": torch.tensor([tiny])}), (1.0, right))

    assert errors(4.0, 1.1e-7)["right"]  # of 1e-8, beside 5
    assert errors(4.0, 2e-7)["gradient_error"] == pytest.approx(1e-7 / 5e-5)
    assert not errors(4.0, 2e-7)["right"]
    assert not errors(4.01, 1e-7)["right"]


@pytest.mark.parametrize(("version", "shares"), [((2, 28, 9), False), ((2, 30, 1), True), ((3, 0, 0), True)])
def test_two_ranks_of_nccl_share_a_gpu_where_it_allows_that(
    version: tuple[int, ...], shares: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    names = {part.name for part in parts_of(tmp_path, torch.device("cuda"), is_small=False)}
    assert ("two_ranks.nccl" in names) == shares
    assert "two_ranks.host-memory" in names
