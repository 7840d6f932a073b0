"""`bapipe estimate`, and `bapipe plan` with the groups that it estimates."""

import json
from pathlib import Path

import pytest

from bapipe.cli import main
from bapipe.formats.codec import read, write
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile, is_estimate
from tests.estimates.test_estimate import hosts, network


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["bapipe", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("one.json", network(2))
    write("c.json", hosts(4, bytes_per_s=10**12, latency_ns=0))
    return tmp_path


def test_estimates_are_planned_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(monkeypatch, "estimate", "one.json", "--split", "spatial:4", "--cluster", "c.json", "-o", "four.json") == 0
    )
    assert "estimated, not measured: spatial split" in capsys.readouterr().out
    assert is_estimate(read("four.json", ModelProfile))
    options = "--cluster", "c.json", "--minibatch-size", "2", "-o", "plan.json"
    assert run(monkeypatch, "plan", "one.json", "four.json", *options, "--json") == 0
    printed = capsys.readouterr()
    assert "estimated, not measured: spatial split" in " ".join(printed.err.split())
    assert "4 a devices" in json.dumps(json.loads(printed.out))
    assert [device.num_members for device in read("plan.json", Plan).cluster.devices] == [4]
    assert run(monkeypatch, "plan", "one.json", "four.json", *options, "--group", "1", "--json") == 0
    assert [device.num_members for device in read("plan.json", Plan).cluster.devices] == [1] * 4


def test_wrong_splits_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, message in (
        ("rows:2", "--split rows:2: want one of tensor, filter, channel, spatial, sharded, and members"),
        ("spatial", "--split spatial: want one of"),
        ("spatial:8", "no host of the --cluster has 8 devices of kind 'a': h has 4; use fewer members"),
    ):
        assert run(monkeypatch, "estimate", "one.json", "--split", split, "--cluster", "c.json", "-o", "x.json") == 1
        assert message in " ".join(capsys.readouterr().err.split())


def test_strategies_are_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "compare", "one.json", "--cluster", "c.json", "--minibatch-size", "8", "--schedule", "1f1b"
    assert run(monkeypatch, *where, "--strategies", "--json", "--html", "table.html") == 0
    found = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)}
    assert "data + filter" in Path("table.html").read_text()
    assert found["best plan"]["step_ns"] <= found["data"]["step_ns"]
    assert run(monkeypatch, *where, "--strategies", "--markdown", "--whole", "first") == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert (head.split(" | ")[1], len(rows)) == ("step_ns", len(found))
    assert run(monkeypatch, *where, "--strategies", "--memory-limit", "6000") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "how far each goes" in shown
    assert "data: the plan does not fit" in shown
    assert run(monkeypatch, *where, "--whole", "first") == 1
    assert "--whole and --markdown go with --strategies" in capsys.readouterr().err
