"""Nothing is lost when something dies: kills, other plans, full disks, frozen ranks, damaged checkpoints."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.folder import list_checkpoints
from bapipe.training.checkpoint.manifest import read_manifest
from bapipe.training.checkpoint.writer import full_state_dict
from bapipe.training.run import export
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.zoo.example import Example
from tests import PYTHONPATH
from tests.multiprocess.fault_cases import noisy, plan_of, points, quiet
from tests.multiprocess.launch_cases import classifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("survival")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("fault_cases.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "TORCH_CPP_LOG_LEVEL": "FATAL"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def test_a_run_killed_six_times_ends_like_an_uninterrupted_run(seen: dict[str, Any]) -> None:
    killed = seen["killed"]
    assert killed["kills"] == 6
    assert killed["equal"]
    assert 0 < killed["steps_after_the_last"] < 40  # it went on from a checkpoint
    assert killed["kept"] == ["step-000000038", "step-000000040"]


def test_a_checkpoint_loads_under_any_plan(seen: dict[str, Any]) -> None:
    assert len(seen["replanned"]["losses"]) == 15
    assert seen["replanned"]["losses"] == pytest.approx(seen["replanned"]["alone"], abs=1e-5)


def test_a_full_disk_ends_every_rank_and_leaves_no_checkpoint(seen: dict[str, Any]) -> None:
    said = "rank 1 (cpu1) could not write the checkpoint of 4 steps: OSError: [Errno 27] File too large"
    assert [text.partition(": ")[2] for text in seen["full_disk"]] == [said, said]


def test_ranks_without_a_common_folder_for_checkpoints_are_refused_before_the_first_step(seen: dict[str, Any]) -> None:
    here = socket.gethostname()
    said = (
        f"`checkpoint` own: rank 1 (cpu1) on {here} does not see what rank 0 (cpu0) on {here} writes there: name a "
        "folder on a disk that all hosts share"
    )
    assert [text.partition(": ")[2] for text in seen["folders_apart"]] == [said, said]


def test_a_frozen_rank_is_noticed_at_the_timeout(seen: dict[str, Any]) -> None:
    assert re.fullmatch(
        r"RunFailed: rank 0 \(cpu0\) waited more than 2 s for another rank at step \d+: rank 1 \(cpu1\) hangs, or the "
        "link to it is cut",
        seen["frozen"]["said"],
    )
    assert seen["frozen"]["waited_s"] < 5


def test_a_signal_to_one_rank_of_a_job_stops_all_after_the_same_step(seen: dict[str, Any]) -> None:
    found = seen["signalled"]
    assert found["codes"] == [143, 143]
    assert found["said"][0] == found["said"][1]
    steps = re.fullmatch(
        r"Stopped: stopped by SIGTERM after (\d+) steps, of which there is a checkpoint: continue with `resume`",
        found["said"][0],
    )
    assert steps, found["said"]
    assert found["kept"] == [f"step-{int(steps[1]):09d}"]


def test_a_killed_rank_of_a_job_is_named(seen: dict[str, Any]) -> None:
    reported = [text for text in seen["one_killed"] if text.startswith("RunFailed: ")]
    assert re.fullmatch(
        r"RunFailed: rank 1 \(cpu1\) ended without a word, as a killed process does: rank \d \(cpu\d\) lost the "
        r"connection to it at step \d+",
        *reported,
    )


def test_a_cut_link_ends_every_rank_at_the_timeout_and_nothing_is_lost(seen: dict[str, Any]) -> None:
    found = seen["cut_off"]
    if "skipped" in found:
        pytest.skip(found["skipped"])
    for rank, said in enumerate(found["said"]):
        assert re.fullmatch(
            rf"RunFailed: rank {rank} \(cpu{rank}\) waited more than 2 s for another rank at step \d+: "
            rf"{'that one' if rank else re.escape('rank 1 (cpu1)')} hangs, or the link to it is cut",
            said,
        ), said
    assert found["waited_s"] < 2 + 5
    assert 0 < found["steps_after"] < 40
    assert found["equal"]


def test_a_slow_and_lossy_link_changes_nothing(seen: dict[str, Any]) -> None:
    found = seen["slow_and_lossy"]
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert found["said"] == found["alone"]
    assert len(json.loads(found["said"][0])) == 2


def test_a_loss_that_is_not_finite_ends_every_rank(seen: dict[str, Any]) -> None:
    said = (
        "the loss is nan at step 0, because of the data: input 0 holds values that are not finite in 1 of 12 "
        "samples, on rank 0 (cpu0)"
    )
    assert [text.partition(": ")[2] for text in seen["not_a_number"]] == [said, said]


def test_weights_that_are_not_finite_reach_no_checkpoint(seen: dict[str, Any]) -> None:
    said = (
        "the loss of step 0 is finite, but its update gave weights that are not; parameters that are not finite: rank "
        "0 (cpu0) has 2, '0.weight' first, rank 1 (cpu1) has 5, '2.weight' first: no checkpoint is written of them, "
        "continue from the one before with a lower learning rate"
    )
    assert [text.partition(": ")[2] for text in seen["broken_update"]] == [said, said]


def test_labels_out_of_range_are_named(seen: dict[str, Any]) -> None:
    wanted = "the loss of micro-batch 0 fails: IndexError: Target 7 is out of bounds.; its targets are 7 to 7"
    assert any(wanted in said for said in seen["labels_out_of_range"]), seen["labels_out_of_range"]


def test_one_rank_of_a_job_reports_the_cause(seen: dict[str, Any]) -> None:
    first, second = seen["raised"]
    assert second == (
        "RunFailed: rank 1 (cpu1) failed at step 0: layer '3' (stage 1) fails in the forward of micro-batch 0: "
        "RuntimeError: first line"
    )
    assert first.startswith("RunFailed told: rank 0 (cpu0) lost another rank at step 0: ")


def test_a_rank_out_of_memory_is_named_with_what_was_predicted(seen: dict[str, Any]) -> None:
    first, second = seen["out_of_memory"]
    assert first.startswith("RunFailed told: ")
    assert re.fullmatch(
        r"RunFailed: rank 1 \(cpu1\) ran out of memory at step 0: layer '3' \(stage 1\) fails in the forward of "
        r"micro-batch 0: .*you tried to allocate 4000000000000000 bytes.*; its predicted peak is 5000 bytes, that of "
        r"all ranks of its host 10000: plan again with a `memory_limit_bytes` below 5000, so that stages "
        r"recompute, or with a smaller `microbatch_size`",
        second,
    ), second


def test_torchrun_restarts_a_killed_run_and_passes_on_a_signal(tmp_path: Path) -> None:
    script = Path(__file__).with_name("torchrun_case.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.Popen(
        [*torchrun, "--max-restarts", "1", str(script), str(tmp_path / "kept")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"PYTHONPATH": PYTHONPATH, "GLOO_SOCKET_IFNAME": "lo", "BAPIPE_JOB_SECRET": "known to this test"},
    )
    try:
        assert run.stdout is not None
        steps: list[str] = []
        while steps[-1:] != ["1:7"]:
            steps.append(run.stdout.readline().strip())
            assert steps[-1], run.communicate()[1][-2000:]
        run.send_signal(signal.SIGTERM)
        rest, said = run.communicate(timeout=60)
    finally:
        run.kill()
    first = [f"0:{step}" for step in range(5)]
    again = int(steps[5].partition(":")[2])  # that of step 4 may still have been on its way
    assert again in (2, 4)
    assert steps == [*first, *(f"1:{step}" for step in range(again, 8))]
    last = int([*steps, *rest.split()][-1].partition(":")[2])
    assert list_checkpoints(tmp_path / "kept")[-1].name == f"step-{last + 1:09d}"
    assert run.returncode == 1  # torchrun's own code
    assert "SIGTERM" in said


def test_an_exported_model_is_the_trained_one(seen: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    assert export(folder / "killed" / "alone", output) == 11
    with torch.device("cpu"):
        module = noisy().module.to_empty(device="cpu")
    module.load_state_dict(load_file(output))  # strict
    newest = list_checkpoints(folder / "killed" / "alone")[-1]
    want = full_state_dict(newest, read_manifest(newest))
    assert all(torch.equal(value, want[name]) for name, value in module.state_dict().items())
    with pytest.raises(BapipeError) as caught:
        export(tmp_path, output)
    assert str(caught.value) == (
        f"{tmp_path}: no checkpoint here: give a folder in which a run has written checkpoints"
    )


def other() -> Example:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 17), nn.Tanh(), nn.Linear(17, 3))
    return classifier(module)


TENSORS = "rank-0.safetensors"


def _cut(path: Path) -> None:
    (path / TENSORS).write_bytes((path / TENSORS).read_bytes()[:-7])


def _flip(path: Path) -> None:
    data = bytearray((path / TENSORS).read_bytes())
    data[len(data) // 2] ^= 1
    (path / TENSORS).write_bytes(data)


def _manifest(path: Path) -> None:
    (path / "bapipe.json").write_bytes((path / "bapipe.json").read_bytes()[:-20])


ALONE = r"; .*/kept has no other checkpoint that is whole"


@pytest.mark.parametrize(
    ("damage", "build", "training", "message"),
    [
        (_cut, quiet, TrainConfig(steps=20), rf"{{}} is damaged: '{TENSORS}' has \d+ bytes, not \d+{ALONE}"),
        (_flip, quiet, TrainConfig(steps=20), f"{{}} is damaged: '{TENSORS}' does not hold what was written{ALONE}"),
        (lambda path: (path / TENSORS).unlink(), quiet, TrainConfig(steps=20),
         f"{{}} is no whole checkpoint: '{TENSORS}' is missing{ALONE}"),
        (lambda path: (path / "bapipe.json").unlink(), quiet, TrainConfig(steps=20),
         f"{{}} is no whole checkpoint: {{}}/bapipe.json: no such file{ALONE}"),
        (_manifest, quiet, TrainConfig(steps=20), rf"{{}}/bapipe.json is damaged: .*{ALONE}"),
        (None, other, TrainConfig(steps=20, optimizer="adam"),
         r"{} is of another model: '2.weight' is float32 of shape \[16, 16\] there and float32 of shape \[17, 16\] here"),
        (None, quiet, TrainConfig(steps=20), "{} was trained with another optimizer: adam there and sgd here"),
        (None, quiet, TrainConfig(steps=20, optimizer="adam", seed=1),
         "{} was trained with another seed: 0 there and 1 here"),
        (None, quiet, TrainConfig(steps=15, optimizer="adam"), "{} is already at step 15; with 15 steps there is nothing left to train"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused(
    seen: dict[str, Any], folder: Path, tmp_path: Path, damage: Any, build: Any, training: TrainConfig, message: str
) -> None:
    shutil.copytree(folder / "replanned" / "replanned", tmp_path / "kept")
    newest = list_checkpoints(tmp_path / "kept")[-1]
    if damage is not None:
        for older in list_checkpoints(tmp_path / "kept")[:-1]:
            shutil.rmtree(older)
        damage(newest)
    config = replace(training, checkpoint=tmp_path / "kept", resume=True)
    with pytest.raises(BapipeError) as caught:
        train(plan_of(build, (), (0,)), build, points(), config)
    assert re.fullmatch(message.replace("{}", re.escape(str(newest))), str(caught.value)), str(caught.value)


def test_a_folder_with_checkpoints_is_not_trained_over(seen: dict[str, Any], folder: Path) -> None:
    checkpoints = folder / "replanned" / "replanned"
    with pytest.raises(BapipeError) as caught:
        train(plan_of(quiet, (), (0,)), quiet, points(), TrainConfig(steps=20, checkpoint=checkpoints))
    assert str(caught.value) == (f"{checkpoints} holds a checkpoint, step-000000015: resume it, or name another folder")
