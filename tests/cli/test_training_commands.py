"""The commands that need torch, from profiling to training, on a model of the test's own."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import redirect_stderr
from io import StringIO
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bapipe.cli import main
from bapipe.cli.run import train_with_bar
from bapipe.errors import BapipeError
from bapipe.formats.codec import read, write
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.hardware import num_cores
from bapipe.training.run import run
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import Evaluation, OnEvaluation, OnStep, StepReport
from tests import ROOT

COMMAND = [sys.executable, "-c", "from bapipe.cli import main; main()"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile of tiny and a plan of two stages."""
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copy(ROOT / "tests" / "models" / "tiny.py", folder)
    for arguments in (
        ("profile", "tiny:tiny", "--arg", "width=32", "--microbatch-size", "2,4"),
        ("plan", "profile.json", "--devices", "2", "--stages", "2", "--minibatch-size", "8"),
    ):
        done = bapipe(folder, *arguments)
        assert done.returncode == 0, done.stderr
    return folder


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "150"}


def bapipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300
    )


def refused(folder: Path, *arguments: str) -> str:
    """Returns the one line with which a command ends, in this process; what shows its progress is left out."""
    said = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        patch.chdir(folder)
        patch.setenv("COLUMNS", "150")
        patch.setattr("sys.argv", ["bapipe", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 1
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("starting ")]  # if it is slow
    assert len(lines) == 1
    return f"{lines[0]}\n"


def changed(folder: Path, name: str, **values: Any) -> None:
    """Writes the plan with some top-level values replaced."""
    tree = json.loads((folder / "plan.json").read_bytes()) | values
    (folder / name).write_text(json.dumps(tree))


def test_the_profile_names_the_layers_and_the_loss(folder: Path) -> None:
    profile = read(folder / "profile.json", ModelProfile)
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "3", "loss"]
    assert profile.arguments == {"width": 32}
    assert profile.microbatch_sizes == (2, 4)


def test_run_trains_in_the_plans_order_and_prints_json(folder: Path) -> None:
    training = ("--data", "tiny:own", "--steps", "12", "--lr", "0.05", "--eval-every", "5", "--eval-samples", "6")
    done = bapipe(folder, "run", "plan.json", *training, "--tensorboard", "board", "--json", "--trace", "measured.json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    plan = read(folder / "plan.json", Plan)
    assert told["losses"][-1] < told["losses"][0]
    assert [(found["steps"], found["num_samples"]) for found in told["evaluations"]] == [(5, 6), (10, 6), (12, 6)]
    assert all(found["near"] * 6 in range(7) for found in told["evaluations"])
    assert told["evaluations"][-1]["loss"] < told["evaluations"][0]["loss"]
    last = told["evaluations"][-1]
    assert f"step 12/12  held-out loss {last['loss']:.4f}, near {last['near']:.1f}, 6 samples in " in done.stderr
    written = EventAccumulator(str(folder / "board")).Reload()
    assert [event.value for event in written.Scalars("loss")] == pytest.approx(told["losses"])
    assert [event.step for event in written.Scalars("held_out/near")] == [5, 10, 12]
    assert [rank["order"] for rank in told["ranks"]] == [list(order) for order in plan.order]
    assert told["predicted_step_ns"] == plan.prediction.step_ns
    names = {event["name"] for event in json.loads((folder / "measured.json").read_text())["traceEvents"]}
    assert {action for order in plan.order for action in order} <= names


def test_the_readme_exports_what_its_run_has_trained(folder: Path, tmp_path: Path) -> None:
    """Its commands on a plan of tiny, with fewer steps."""
    for name in ("tiny.py", "plan.json"):
        shutil.copy(folder / name, tmp_path)
    lines = (ROOT / "README.md").read_text().splitlines()
    for command in ("run plan.json --steps 50", "export"):
        (line,) = [line for line in lines if line.startswith(f"bapipe {command} ")]
        words = line.replace("--steps 50", "--steps 2").split("#")[0].split()[1:]
        done = bapipe(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": True}, "data 'tiny:own' is no folder of images, so `augment` cannot draw pieces of them"),
        ({"buckets": 2}, "data 'tiny:own' are no sentences, so they cannot be put into 2 buckets by length"),
        ({"evaluate_every": 0}, "`evaluate_every` is 0: want at least 1"),
        ({"evaluate_every": 1, "evaluate_samples": 0}, "`evaluate_samples` is 0: want at least 1"),
        (
            {"evaluate_every": 1, "evaluate_samples": 64},
            "the data has 64 samples, and evaluation takes 64 of them away: give more data, or a smaller `evaluate_samples`",
        ),
        (
            {"evaluate_every": 1, "evaluate_samples": 60},
            "the data has 4 samples, less than a mini-batch of 8: give more data, or plan with a smaller `minibatch_size`",
        ),
    ],
)
def test_what_the_data_cannot_give_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(BapipeError) as error:
        run(read(folder / "plan.json", Plan), data="tiny:own", **options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resume",), "--resume needs --checkpoint, the folder to continue from"),
        (("--eval-samples", "5"), "--eval-samples needs --eval-every, the steps between two evaluations"),
        (("--keep", "1"), "--keep needs --checkpoint, the folder for checkpoints: else none is written"),
        (("--profile", "profile.json"), "--profile goes with --replan: a plan runs without its profile"),
    ],
)
def test_options_that_lack_another_are_refused(folder: Path, options: tuple[str, ...], message: str) -> None:
    assert refused(folder, "run", "plan.json", *options) == f"error: {message}\n"


def test_another_factory_than_that_of_the_model_is_not_the_one_to_trust(folder: Path) -> None:
    leave = "is not the plan's factory, which is 'tiny:tiny': leave it out, or name that one if you trust the plan"
    for source in ("plan.json", "tiny:tiny"):
        said = refused(folder, "run", source, "--trust-factory", "os:system")
        assert said == f"error: --trust-factory os:system {leave}\n"


def test_the_reason_to_plan_again_names_flags(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = read(folder / "plan.json", Plan)

    def lost(*arguments: Any) -> None:
        *_, on_replan = arguments
        on_replan("rank 1 was killed: plan with a smaller `microbatch_size`", plan)

    monkeypatch.setattr("bapipe.cli.run.run_configured", lost)
    train_with_bar(plan, TrainConfig(), ())
    assert "plan with a smaller --microbatch-size; continuing with stages on cpu0, cpu1, " in capsys.readouterr().err


def step_report(step: int) -> StepReport:
    """What is reported of a step of one nanosecond."""
    return StepReport(
        step=step,
        loss=1.0,
        step_ns=1,
        data_ns=0,
        bubble=0.0,
        learning_rate=0.1,
        as_planned=True,
        devices=("cpu0", "cpu1"),
        peak_bytes=(None, None),
    )


def test_a_score_is_on_the_line_of_its_evaluation_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score = Evaluation(steps=2, num_samples=10, loss=0.5, metrics=(("top-1", 0.25),), elapsed_ns=1_000_000)

    def run(*arguments: Any) -> None:
        on_step: OnStep = arguments[-3]
        on_evaluation: OnEvaluation = arguments[-2]
        for step in range(5):
            on_step(step_report(step))
            if step == 1:
                on_evaluation(0, 10, None)
                on_evaluation(10, 10, score)

    ticks = count(3, step=3)  # seconds: each step is told of
    monkeypatch.setattr("bapipe.cli.run.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr("bapipe.cli.run.run_configured", run)
    train_with_bar(read(folder / "plan.json", Plan), TrainConfig(steps=5), ())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/5", "2/5", "2/5", "3/5", "4/5", "5/5"]
    assert [line for line in lines if "held-out" in line] == [
        "step 2/5  held-out loss 0.5000, top-1 25.0%, 10 samples in 1.00 ms"
    ]


def test_ranks_that_take_long_to_start_are_named_until_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starting = "starting 2 stages: building the model, comparing its stages with it"
    said: list[str] = []

    def slow(*arguments: Any) -> None:
        on_step: OnStep = arguments[-3]
        end_s = time.monotonic() + 30
        while "".join(said).count(starting) < 2 and time.monotonic() < end_s:
            time.sleep(0.01)
            said.append(capsys.readouterr().err)
        on_step(step_report(0))
        said.append(capsys.readouterr().err)
        time.sleep(0.2)

    monkeypatch.setattr("bapipe.cli.progress.SILENT_S", 0.02)
    monkeypatch.setattr("bapipe.cli.run.run_configured", slow)
    train_with_bar(read(folder / "plan.json", Plan), TrainConfig(steps=2), ("steps",))
    assert "".join(said).count(starting) >= 2
    assert starting not in capsys.readouterr().err


def test_run_of_a_model_profiles_and_plans_first(folder: Path) -> None:
    done = bapipe(folder, "run", "tiny:tiny", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "predicted and measured" in done.stdout
    kept = [read(path, ModelProfile) for path in (folder / "cache" / "bapipe").glob("*.profile.json")]
    asked = {(p.settings.threads, p.microbatch_sizes) for p in kept if not p.arguments}  # type: ignore[union-attr]
    assert asked == {(1, (1, 2, 4, 8)), *([(num_cores(), (4, 8))] if num_cores() > 1 else [])}


def test_cluster_lists_devices_and_a_measured_link(folder: Path) -> None:
    done = bapipe(folder, "cluster", "--devices", "1", "-o", "cluster.json")
    assert done.returncode == 0, done.stderr
    assert "within a host" in done.stdout


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"factory": None}, "error: the plan of tiny names no factory, so there is nothing to build the model with"),
        ({"factory": "tiny:large"}, "error: module 'tiny' has no function 'large'"),
        ({"arguments": {"depth": 3}}, "error: factory 'tiny:tiny' does not take these arguments"),
        (
            {"minibatch_size": 7},
            "error: damaged.json: 4 micro-batches of 2 are not a mini-batch of 7 - at `$.minibatch_size`",
        ),
        ({"order": [[], []]}, "error: stage 0, micro-batch 0: has nothing; want F and B, or F, I and W"),
    ],
)
def test_a_plan_that_cannot_run_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], message: str
) -> None:
    if "minibatch_size" in values:
        values = values | {"num_microbatches": 4, "microbatch_size": 2}
    changed(folder, "damaged.json", **values)
    assert refused(folder, "run", "damaged.json").startswith(message)
    assert capsys.readouterr().out == ""


def test_a_plan_for_another_model_is_refused(folder: Path) -> None:
    plan = read(folder / "plan.json", Plan)
    stages = [{"layers": [name.replace("2", "two") for name in s.layers], "devices": s.devices} for s in plan.stages]
    changed(folder, "other.json", stages=stages)
    said = refused(folder, "run", "other.json")
    assert said.startswith("error: ")
    assert "two" in said


def test_more_devices_than_the_machine_has_are_refused(folder: Path) -> None:
    plan = read(folder / "plan.json", Plan)
    many = 4096
    tree = json.loads((folder / "plan.json").read_bytes())
    device = tree["cluster"]["devices"][0]
    tree["cluster"]["devices"] = [device | {"name": f"cpu{i}"} for i in range(many)]
    tree["stages"] = [{"layers": list(s.layers), "devices": [f"cpu{i}"]} for i, s in enumerate(plan.stages)]
    tree["stages"][0]["devices"] = [f"cpu{i}" for i in range(many) if i != 1]
    tree["order"] = [tree["order"][0], tree["order"][1], *[[] for _ in range(many - 2)]]
    (folder / "many.json").write_text(json.dumps(tree))
    for arguments in (("run", "many.json"), ("cluster", "--devices", str(many), "-o", "none.json")):
        assert f"{many}" in refused(folder, *arguments)
    assert not (folder / "none.json").exists()


def children(pid: int) -> list[int]:
    """The ranks of a run: its child processes that `bapipe.processes` started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"bapipe.processes" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended meanwhile
            continue
    return sorted(found)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def running(folder: Path, *options: str, **pipes: Any) -> "subprocess.Popen[str]":
    arguments = ("run", "plan.json", "--steps", "1000000", *options)
    return subprocess.Popen([*COMMAND, *arguments], cwd=folder, env=environment(folder), text=True, **pipes)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize(
    ("number", "options", "code", "said"),
    [
        (signal.SIGKILL, (), 1, r"error: rank 1 \(cpu1\) was killed by SIGKILL at step .*"),
        (signal.SIGINT, (), 130, "interrupted: all ranks have ended"),
        (signal.SIGTERM, ("--checkpoint", "kept"), 143,
         r"stopped by SIGTERM after (\d+) steps, of which there is a checkpoint: continue with --resume"),
    ],
)  # fmt: skip
def test_a_run_ends_with_all_its_ranks(
    folder: Path, number: signal.Signals, options: tuple[str, ...], code: int, said: str
) -> None:
    run = running(folder, *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert run.stderr is not None
        lines = iter(run.stderr.readline, "")
        first = next(line for line in lines if not line.startswith("starting 2 stages: "))
        assert first.startswith("step 1/1000000"), first
        ranks = children(run.pid)
        assert len(ranks) == 2
        os.kill(ranks[1] if number == signal.SIGKILL else run.pid, number)
        _, rest = run.communicate(timeout=30)
        assert not any(alive(rank) for rank in ranks)
        last = [line for line in rest.splitlines() if not line.startswith("step ")]
        assert run.returncode == code
        assert len(last) == 1
        found = re.fullmatch(said, last[0])
        assert found, last
        if "--checkpoint" in options:
            newest = sorted((folder / "kept").glob("step-*"))[-1]
            assert newest.name == f"step-{int(found[1]):09d}"
    finally:
        run.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_nothing_is_left_running_when_the_terminal_closes(folder: Path) -> None:
    terminal, end = os.openpty()
    own = {"start_new_session": True, "stdin": end, "stdout": end, "stderr": end}
    run = running(folder, "--checkpoint", "closed", "--checkpoint-every", "1", preexec_fn=own_terminal, **own)
    os.close(end)
    try:
        end_s = time.monotonic() + 60
        while not list((folder / "closed").glob("step-*")):
            assert time.monotonic() < end_s
            os.read(terminal, 10**6)
        ranks = children(run.pid)
        os.close(terminal)
        assert run.wait(30) == 129
        assert not any(alive(rank) for rank in ranks)
    finally:
        run.kill()


def own_terminal() -> None:
    """Makes stdin the terminal that a signal comes from when it is closed."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGTERM, 143, "stopped by SIGTERM\n"),
        (signal.SIGHUP, 129, "stopped by SIGHUP\n"),
    ],
)
def test_a_signal_while_modules_are_imported_ends_with_one_line(
    tmp_path: Path, number: signal.Signals, code: int, message: str
) -> None:
    (tmp_path / "typer.py").write_text(f"import os, time\nos.kill(os.getpid(), {number})\ntime.sleep(60)")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "bapipe", "--help"], env=environment, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", message)


def test_a_profile_of_other_layers_cannot_simulate_the_plan(folder: Path) -> None:
    profile = read(folder / "profile.json", ModelProfile)
    tree = json.loads((folder / "profile.json").read_bytes())
    tree["layers"][1]["name"] = "one"
    (folder / "renamed.json").write_text(json.dumps(tree))
    done = bapipe(folder, "simulate", "plan.json", "renamed.json")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the plan's layer '1' is not in the profile of tiny")
    write(folder / "again.json", profile)
    assert bapipe(folder, "simulate", "plan.json", "again.json").returncode == 0
