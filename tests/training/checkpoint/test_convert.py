"""Checkpoints of the older format are converted exactly, and no code in them runs, whatever they hold."""

import errno
import json
import pickle
import random
import shutil
import subprocess
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.manifest import read_manifest, stored_tensors
from bapipe.training.checkpoint.tensor_files import read_tensors
from bapipe.training.run import convert_checkpoint
from tests.training.checkpoint.cases import go, read_tree


def make_old(checkpoint: Path) -> None:
    """Replaces a checkpoint by the same one in the older format."""
    tree, manifest = read_tree(checkpoint), read_manifest(checkpoint)
    tensors = dict(read_tensors([checkpoint / name for name in manifest.files], stored_tensors(manifest)))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    shutil.rmtree(checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "saving in a single process": that is intended
        save(tensors, checkpoint_id=checkpoint, no_dist=True)
    for key in ("digest", "minibatch_sizes", "plan", "versions", "optimizer_numbers", "options", "samples"):
        del tree[key]
    write_old(checkpoint, tree | {"bapipe": "checkpoint/1"})


def write_old(checkpoint: Path, tree: Any) -> None:
    """Writes the manifest with the checksums of the files."""
    files = {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir()) if path.name != "bapipe.json"}
    sums = {name: {"num_bytes": len(data), "crc32": zlib.crc32(data)} for name, data in files.items()}
    (checkpoint / "bapipe.json").write_text(json.dumps(tree | {"files": sums}, separators=(",", ":")))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    go(folder, 6)
    for step in (4, 6):
        make_old(folder / f"step-{step:09d}")
    return folder


@pytest.fixture
def kept(old: Path, tmp_path: Path) -> Path:
    shutil.copytree(old, tmp_path / "kept")
    return tmp_path / "kept"


def test_an_old_checkpoint_is_refused_and_a_converted_one_continues(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(BapipeError) as caught:
        go(kept, 8)
    assert str(caught.value) == (
        f"{kept}/step-000000006 is of an older version, whose checkpoints can run code when they are read: "
        f"`bapipe convert-checkpoint {kept}/step-000000006` converts it without running any"
    )
    assert [path.name for path in convert_checkpoint(kept)] == ["step-000000004", "step-000000006"]
    assert go(kept, 8).losses == go(tmp_path / "alone", 8).losses[6:]
    assert sorted(path.name for path in kept.glob("old-*")) == ["old-step-000000004", "old-step-000000006"]
    with pytest.raises(BapipeError, match=r"/kept: no checkpoint of an older version here$"):
        convert_checkpoint(kept)


def test_a_checkpoint_that_could_not_be_converted_is_converted_by_the_next_call(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("bapipe.training.checkpoint.writer.write_bytes", full)
        with pytest.raises(BapipeError, match=r"step-000000004: cannot be converted: No space left on device$"):
            convert_checkpoint(kept)
    assert not list(kept.glob("old-*"))
    assert [path.name for path in convert_checkpoint(kept)] == ["step-000000004", "step-000000006"]
    assert read_manifest(kept / "step-000000004").position.step == 4


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, how: Callable[..., object], *arguments: object) -> None:
        self._call = how, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("place", ["index", "tensors"])
def test_code_in_an_old_checkpoint_does_not_run(kept: Path, tmp_path: Path, place: str) -> None:
    checkpoint, sign = kept / "step-000000006", tmp_path / "sign"
    tree = json.loads((checkpoint / "bapipe.json").read_text())
    evil = Evil(subprocess.call, ["touch", str(sign)])
    if place == "index":
        (checkpoint / ".metadata").write_bytes(pickle.dumps(evil))
        said = r"cannot be converted: its index names 'subprocess.call', which is not needed to say where tensors are$"
    else:
        data = next(checkpoint.glob("*.distcp"))
        index = (checkpoint / ".metadata").read_bytes()
        torch.save(evil, data)
        length = data.stat().st_size
        data.write_bytes(data.read_bytes() + bytes(10_000))
        assert length < 65_536
        (checkpoint / ".metadata").write_bytes(index)
        said = r"is damaged: its index cannot be read: "
    write_old(checkpoint, tree)
    with pytest.raises(BapipeError, match=said):
        convert_checkpoint(checkpoint)
    assert not sign.exists()
    assert checkpoint.is_dir()


def test_a_damaged_index_is_one_line(kept: Path) -> None:
    checkpoint, rng = kept / "step-000000006", random.Random(0)
    tree, index = json.loads((checkpoint / "bapipe.json").read_text()), (checkpoint / ".metadata").read_bytes()
    refused = 0
    for _ in range(150):
        data = bytearray(index)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (checkpoint / ".metadata").write_bytes(bytes(data))
        write_old(checkpoint, tree)
        try:
            convert_checkpoint(checkpoint)
        except BapipeError as error:
            refused += "\n" not in str(error)
        else:  # what was changed is not read: the same tensors
            shutil.rmtree(checkpoint)
            (kept / "old-step-000000006").rename(checkpoint)
            refused += 1
    assert refused == 150


def test_a_damaged_or_strange_old_checkpoint_is_refused(kept: Path) -> None:
    checkpoint = kept / "step-000000006"
    tree = json.loads((checkpoint / "bapipe.json").read_text())
    for change, said in (
        ({"seed": "0"}, r"bapipe.json is damaged: "),
        ({"files": {"../step-000000004/bapipe.json": {"num_bytes": 1, "crc32": 0}}}, r"'\.\./step-\S+' is missing$"),
        (
            {"position": {"step": 6, "epoch": 0, "offset": 11}},
            r"mini-batches of no one size end at sample 11 of epoch 0",
        ),
        ({"position": {"step": 4, "epoch": 0, "offset": 48}}, r"it holds the checkpoint of 4 steps$"),
        ({"optimizer_tensors": {}}, r"its files hold other tensors than bapipe.json says$"),
    ):
        (checkpoint / "bapipe.json").write_text(json.dumps(tree | change, separators=(",", ":")))
        with pytest.raises(BapipeError, match=said):
            convert_checkpoint(checkpoint)


def test_a_folder_that_is_none_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(BapipeError, match=r"nowhere/kept: no such folder$"):
        convert_checkpoint(tmp_path / "nowhere" / "kept")
    assert list(tmp_path.iterdir()) == []
