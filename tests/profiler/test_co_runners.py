"""Co-runners train while a model is measured, and have ended when it is done."""

import time
from pathlib import Path

import pytest

from bapipe.errors import BapipeError
from bapipe.hardware import num_cores
from bapipe.processes import LocalProcess
from bapipe.profiler import co_runners as co_runners_module
from bapipe.profiler.co_runners import co_runners
from bapipe.profiler.options import ProfileOptions
from bapipe.profiler.profile import profile_model

NOTING = """
import torch
from bapipe.zoo.example import Example

def noting(file):
    def loss(output, target):
        with open(file, "a") as notes:
            notes.write(f"{len(target)} ")
        return (output - target).square().mean()
    module = torch.nn.Sequential(torch.nn.Linear(2, 1))
    return Example(module=module, inputs=(torch.zeros(1, 2),), target=torch.zeros(1, 1), loss=loss)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "noted.py").write_text(NOTING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(num_cores() < 2, reason="a co-runner needs another core")
def test_a_co_runner_trains_until_the_context_is_left(folder: Path) -> None:
    notes = folder / "notes"
    with co_runners(1, "noted:noting", {"file": str(notes)}, 3):
        before = notes.stat().st_size if notes.exists() else 0
        time.sleep(0.5)
        assert notes.stat().st_size > before
    done = notes.read_text()
    time.sleep(0.1)
    assert notes.read_text() == done
    assert set(done.split()) == {"3"}  # the micro-batch size


@pytest.mark.skipif(num_cores() < 2, reason="a co-runner needs another core")
def test_a_profile_records_the_number_of_co_runners(folder: Path) -> None:
    arguments = {"file": str(folder / "notes")}
    measured = profile_model("noted:noting", arguments, ProfileOptions(microbatch_sizes=(2,)), num_co_runners=1)
    assert measured.environment["co_runners"] == 1
    assert measured.arguments == arguments


@pytest.mark.skipif(num_cores() < 2, reason="a co-runner needs another core")
def test_a_co_runner_that_ends_while_layers_are_measured_ends_the_profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times since then are those of a quieter machine; those of sizes before are kept."""
    started: list[LocalProcess] = []

    def killed(part: int, num_parts: int, name: str) -> None:
        if name == "times at micro-batch size 2":
            started[0].popen.kill()

    def noted(processes: tuple[LocalProcess, ...]) -> None:
        started.extend(processes)
        real(processes)

    real = co_runners_module._wait_until_training
    monkeypatch.setattr(co_runners_module, "_wait_until_training", noted)
    arguments = {"file": str(folder / "notes")}
    with pytest.raises(BapipeError) as caught:
        profile_model(
            "noted:noting", arguments, ProfileOptions(microbatch_sizes=(1, 2)), num_co_runners=1, progress=killed
        )
    assert str(caught.value) == (
        "a co-runner has ended while layers were measured: it was killed by SIGKILL, as a system out of memory does; measure again, if memory is scarce "
        "with fewer co-runners; the measurements at micro-batch size 1 are stored, and the same command continues from "
        "there"
    )


@pytest.mark.skipif(num_cores() < 2, reason="a co-runner needs another core")
def test_the_error_of_a_co_runner_that_cannot_start_has_its_cause(folder: Path) -> None:
    with pytest.raises(BapipeError) as error, co_runners(1, "noted:none", {}, 1):
        pass
    assert str(error.value).startswith("a co-runner cannot train the model: ")
    assert "module 'noted' has no function 'none'" in str(error.value)


def test_co_runners_need_cores() -> None:
    num = num_cores()
    with pytest.raises(BapipeError) as error, co_runners(num, "noted:noting", {}, 1):
        pass
    assert (
        str(error.value) == f"{num} co-runners and the measuring process need {num + 1} cores; this machine has {num}"
    )
