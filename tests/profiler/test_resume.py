"""Measurements made before a failure are saved, and the same command continues from there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bapipe.cli import main
from bapipe.errors import InvalidModel, RunFailed
from bapipe.formats.codec import read
from bapipe.formats.profile import ModelProfile
from bapipe.profiler.options import ProfileOptions
from bapipe.profiler.profile import profile_model, profile_model_cached
from bapipe.zoo.example import Example

most_samples = 2
failure: BaseException = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


class Narrow(nn.Identity):
    """Fails above so many samples."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if len(input) > most_samples:
            raise failure
        return input


Narrow.__module__ = "torch.nn.own"  # a layer, to the tracer


def narrow() -> Example:
    return Example(
        module=nn.Sequential(nn.Linear(4, 4), Narrow(), nn.Linear(4, 1)),
        inputs=(torch.zeros(1, 4),),
        target=torch.zeros(1, 1),
        loss=nn.functional.mse_loss,
    )


FACTORY = f"{__name__}:narrow"


def profiled(*sizes: int) -> tuple[list[str], tuple[int, ...]]:
    told: list[str] = []
    made = profile_model(
        FACTORY,
        {},
        ProfileOptions(microbatch_sizes=sizes),
        progress=lambda done, total, next_part: told.append(f"{done}/{total} {next_part}"),
    )
    return told, made.microbatch_sizes


def test_an_interrupted_profile_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = f"{__name__}"
    with pytest.raises(InvalidModel) as error:
        profiled(4)
    text = (
        "layer '1' ran out of memory in its forward at micro-batch size 4: measure smaller `microbatch_sizes`, "
        "or one layer at a time with `layer_by_layer`"
    )
    assert str(error.value) == text
    with pytest.raises(RunFailed) as failed:
        profiled(1, 2, 4)
    stored = "the measurements at micro-batch size 1, 2 are stored, and the same command continues from there"
    assert str(failed.value).startswith(f"{text}; size 4 is expected to take ")
    assert str(failed.value).endswith(
        "the measurements at micro-batch size 1, 2 are stored: with `microbatch_sizes` 1,2 the same command makes a "
        "profile of them"
    )
    monkeypatch.setattr(f"{here}.failure", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as interrupted:
        profiled(1, 2, 4)
    assert str(interrupted.value) == stored
    monkeypatch.setattr(f"{here}.most_samples", 10**6)
    told, sizes = profiled(1, 4)
    begun = (
        "0/3 trace and check of the split model",
        "1/3 times at micro-batch size 4",
        "2/3 memory at micro-batch size 4",
    )
    assert told == [*begun, "3/3 done"]
    assert sizes == (1, 4)
    assert list((tmp_path / "bapipe").iterdir()) == []  # a complete profile leaves no unfinished one
    assert profiled(1)[0][1] == "1/4 times at micro-batch size 1"


def test_what_was_measured_is_stored_until_its_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def exit_code(output: str) -> object:
        command = ["bapipe", "profile", FACTORY, "--microbatch-size", "1,2", "--kind", "cpu-own", "-o", output]
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    assert exit_code("/dev/full") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: /dev/full: cannot be written: No space left on device; the measurements at micro-batch size 1, 2 are "
        "stored, and the same command continues from there"
    )
    (stored,) = (tmp_path / "bapipe").iterdir()
    measurements = read(stored, ModelProfile).measurements
    assert exit_code("profile.json") == 0
    written = read(tmp_path / "profile.json", ModelProfile)
    assert (written.measurements, written.device.kind) == (measurements, "cpu-own")
    assert list((tmp_path / "bapipe").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder))
    assert profiled(1, 2)[1] == (1, 2)
    cause = f"{no_folder}/bapipe: cannot be made: Not a directory; set XDG_CACHE_HOME to another folder"
    assert caplog.messages == [f"measurements are lost if they are interrupted: {cause}"]
    caplog.clear()
    assert profile_model_cached(FACTORY, {}, microbatch_sizes=(1,)).microbatch_sizes == (1,)
    assert caplog.messages[-1] == f"the profile is not cached: {cause}"
