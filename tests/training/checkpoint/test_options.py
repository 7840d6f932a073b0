"""A run that resumes takes over the options of the run before it, unless it is given others."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.folder import newest_checkpoint
from bapipe.training.checkpoint.manifest import MANIFEST
from bapipe.training.checkpoint.options import kept_options, resumed_options
from bapipe.training.train_config import TrainConfig
from tests.training.checkpoint.cases import go, read_tree, write_manifest

FIRST = {"learning_rate_schedule": "cosine", "warmup_steps": 1, "clip_norm": 0.5, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of a run with options of its own."""
    folder = tmp_path_factory.mktemp("first")
    go(folder, 2, **FIRST)
    return folder


def test_options_that_are_not_given_are_those_of_the_checkpoint(folder: Path) -> None:
    config = TrainConfig(steps=4, checkpoint=folder, resume=True)
    resumed = resumed_options(config, {"steps", "checkpoint", "resume"}, tell=True)
    assert {name: getattr(resumed, name) for name in FIRST} == FIRST
    assert (resumed.optimizer, resumed.steps, resumed.checkpoint) == ("adam", 4, folder)


def test_checkpoints_come_as_often_as_before_and_as_many_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go(tmp_path, 2, keep=7)  # with a checkpoint after every second step
    resumed = resumed_options(TrainConfig(checkpoint=tmp_path, resume=True), {"checkpoint", "resume"}, tell=True)
    assert (resumed.checkpoint_every, resumed.keep) == (2, 7)
    assert not caplog.records
    config = TrainConfig(checkpoint=tmp_path, resume=True, checkpoint_every=50)
    given = resumed_options(config, {"checkpoint", "resume", "checkpoint_every"}, tell=True)
    assert (given.checkpoint_every, given.keep) == (50, 7)
    assert [record.getMessage() for record in caplog.records] == [
        "`checkpoint_every` is now 50; it was 2 in the run of the checkpoint"
    ]


def test_given_options_are_taken_and_differences_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = TrainConfig(checkpoint=folder, resume=True, clip_norm=2.0, warmup_steps=1)
    with caplog.at_level(logging.WARNING):
        resumed = resumed_options(config, {"clip_norm", "warmup_steps", "learning_rate_schedule"}, tell=True)
    assert (resumed.clip_norm, resumed.learning_rate_schedule, resumed.seed) == (2.0, "constant", 3)
    assert [record.getMessage() for record in caplog.records] == [
        "`learning_rate_schedule` is now constant; it was cosine in the run of the checkpoint",
        "`clip_norm` is now 2.0; it was 0.5 in the run of the checkpoint",
    ]


def test_options_are_those_before_a_damaged_checkpoint(tmp_path: Path) -> None:
    go(tmp_path / "run", 4, **FIRST)
    newest = newest_checkpoint(tmp_path / "run")
    assert newest is not None
    manifest = newest.path / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-10])
    resumed = resumed_options(TrainConfig(checkpoint=tmp_path / "run", resume=True), set(), tell=False)
    assert {name: getattr(resumed, name) for name in FIRST} == FIRST


@pytest.fixture
def trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], TrainConfig]:
    """Returns the configuration of a run that resumes from a checkpoint that says it was trained on some data."""
    go(tmp_path / "kept", 2)
    newest = newest_checkpoint(tmp_path / "kept")
    assert newest is not None
    tree = read_tree(newest.path)
    monkeypatch.chdir(tmp_path)

    def resuming(data: str) -> TrainConfig:
        write_manifest(newest.path, tree | {"options": tree["options"] | {"data": data}})
        return TrainConfig(checkpoint=tmp_path / "kept", resume=True)

    return resuming


def test_a_function_that_gives_data_must_be_named_again(trained_on: Callable[[str], TrainConfig]) -> None:
    config = trained_on("module:function")
    with pytest.raises(BapipeError, match="were trained on `data` module:function: name it again, because calling a"):
        resumed_options(config, {"checkpoint", "resume"}, tell=True)
    assert resumed_options(config, {"data"}, tell=False).data == "synthetic"


def test_data_outside_the_current_folder_must_be_named_again(
    trained_on: Callable[[str], TrainConfig], tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to("/etc")
    for data in ("/etc", "../images", "images/../../others", "link", "~/images", "locale:de/../../etc", "images\0"):
        config = trained_on(data)
        with pytest.raises(BapipeError, match="only those in the current folder are opened"):
            resumed_options(config, {"checkpoint", "resume"}, tell=True)
        assert resumed_options(config, {"data"}, tell=False).data == "synthetic"
    for data in ("synthetic", "mnist", "locale:de", "images", "images/large", str(tmp_path / "images")):
        assert resumed_options(trained_on(data), {"checkpoint", "resume"}, tell=True).data == data


def test_options_that_no_run_can_have_are_refused(tmp_path: Path) -> None:
    go(tmp_path, 2)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    tree = read_tree(newest.path)
    write_manifest(newest.path, tree | {"options": tree["options"] | {"warmup_steps": -1}})
    with pytest.raises(BapipeError, match="`warmup_steps` is -1: want at least 0"):
        resumed_options(TrainConfig(checkpoint=tmp_path, resume=True), {"checkpoint"}, tell=True)
    write_manifest(newest.path, tree | {"options": tree["options"] | {"seed": "three"}})
    with pytest.raises(BapipeError, match=r"Expected `int`, got `str` - at `\$.options.seed`"):
        newest_checkpoint(tmp_path)


def test_checkpoints_without_options_leave_them_as_they_are(tmp_path: Path) -> None:
    go(tmp_path, 2, clip_norm=0.5)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    tree = read_tree(newest.path)
    del tree["options"]
    write_manifest(newest.path, tree)
    config = TrainConfig(checkpoint=tmp_path, resume=True)
    assert resumed_options(config, {"checkpoint"}, tell=True) == config
    go(tmp_path, 4)


def test_arguments_that_json_cannot_hold_are_not_kept() -> None:
    kept = kept_options(TrainConfig(optimizer_arguments={"betas": object()}, buckets=3))
    assert (kept.optimizer_arguments, kept.buckets) == (msgspec.UNSET, 3)
