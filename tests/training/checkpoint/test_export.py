"""Exported weights: one safetensors file, of what such files can hold."""

import os
import stat
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load, load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bapipe.cli.outputs import write_output_file
from bapipe.errors import BapipeError
from bapipe.training.checkpoint.export import export
from bapipe.training.checkpoint.manifest import MANIFEST, decode_manifest, encode_manifest
from bapipe.training.checkpoint.tensor_files import FileDigest, TensorSpec, file_digest
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.zoo.example import Example
from tests.multiprocess.fault_cases import plan_of, points
from tests.multiprocess.launch_cases import classifier
from tests.training.checkpoint.cases import only_rank


class Rotated(nn.Module):
    """A layer with a buffer of a type that checkpoints hold as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = self.linear(x) * self.turns.real.float()
        return turned


def double_complex() -> Example:
    return classifier(nn.Sequential(Rotated()))


def one_layer() -> Example:
    return classifier(nn.Sequential(nn.Linear(4, 3)))


def test_a_tensor_that_the_file_cannot_hold_is_named(tmp_path: Path) -> None:
    config = TrainConfig(steps=1, checkpoint=tmp_path / "kept")
    with only_rank():
        train(plan_of(double_complex, (), (0,)), double_complex, points(), config)
    output, checkpoint = tmp_path / "model.safetensors", tmp_path / "kept" / "step-000000001"
    written = decode_manifest(checkpoint)
    # Torch cannot even copy tensors of 4 bits, which take a byte each as long as they are not packed.
    for dtype, num in (("complex128", 3), ("int4", 48)):
        specs = written.tensors | {"0.turns": TensorSpec(shape=(num,), dtype=dtype)}
        (checkpoint / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(written, tensors=specs)))
        with pytest.raises(BapipeError) as caught:
            export(tmp_path / "kept", output)
        assert str(caught.value) == (
            f"'0.turns' is of dtype {dtype}, which safetensors files do not have: a buffer that the module computes "
            "needs no place in them (register it with persistent=False); keep others in another dtype"
        )
        assert not output.exists()


def large() -> Example:
    return classifier(nn.Sequential(nn.Linear(4, 500_000), nn.Linear(500_000, 3)))


def test_a_model_need_not_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(steps=1, checkpoint=tmp_path / "kept", optimizer="sgd")
    with only_rank():
        train(plan_of(large, (), (0,)), large, points(), config)
    output = tmp_path / "model.safetensors"
    output.write_bytes(bytes(20_000_000))  # another one that is there, which is kept
    num_bytes = 4 * (4 * 500_000 + 500_000 + 3 * 500_000 + 3)
    made: list[int] = []

    class Counting(TorchDispatchMode):
        """Notes the bytes of tensors that torch makes, but for those on memory that is there, such as of a file."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.clone, torch.ops.aten._to_copy):
                made.append(result.nbytes)
            return result

    monkeypatch.setattr("bapipe.training.checkpoint.manifest.MAX_MANIFEST_BYTES", 10**5)  # of the buffer to read it to
    tracemalloc.start()
    try:
        with Counting():
            assert export(tmp_path / "kept", output, write_output_file) == 4
        of_python = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(made) < num_bytes / 10
    assert of_python < num_bytes / 10
    tensors = load_file(output)
    assert sum(tensor.nbytes for tensor in tensors.values()) == num_bytes
    assert output.with_name("model.safetensors~").stat().st_size == 20_000_000


@pytest.mark.parametrize("kind", ["a pipe", "a file that others may read", "a link"])
def test_it_is_written_as_other_files_are(tmp_path: Path, kind: str) -> None:
    config = TrainConfig(steps=1, checkpoint=tmp_path / "kept")
    with only_rank():
        train(plan_of(one_layer, (), (0,)), one_layer, points(), config)
    output, read = tmp_path / "model.safetensors", b""
    if kind == "a pipe":
        os.mkfifo(output)
        with ThreadPoolExecutor(1) as reader:
            pending = reader.submit(output.read_bytes)
            _export_when_read(tmp_path / "kept", output)
            read = pending.result(timeout=60)
    else:
        target = tmp_path / "elsewhere" if kind == "a link" else output
        target.write_bytes(b"older")
        target.chmod(0o664)
        if kind == "a link":
            output.symlink_to(target)
        export(tmp_path / "kept", output)
        read = target.read_bytes()
        assert output.is_symlink() is (kind == "a link")
        assert stat.S_IMODE(target.stat().st_mode) == 0o664
    assert {name: tuple(each.shape) for name, each in load(read).items()} == {"0.weight": (3, 4), "0.bias": (3,)}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def _export_when_read(checkpoint: Path, pipe: Path) -> None:
    """Exports to a pipe as soon as somebody has opened it for reading."""
    end_s = time.monotonic() + 60
    while True:
        try:
            export(checkpoint, pipe)
            return
        except BapipeError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)


@pytest.mark.parametrize("name", ["kept", "kept/step-000000001"])
def test_each_file_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A checkpoint may be of hundreds of gigabytes on a shared disk."""
    config = TrainConfig(steps=1, checkpoint=tmp_path / "kept")
    with only_rank():
        train(plan_of(one_layer, (), (0,)), one_layer, points(), config)
    verified: list[str] = []

    def digest(path: Path) -> FileDigest:
        verified.append(path.name)
        return file_digest(path)

    monkeypatch.setattr("bapipe.training.checkpoint.manifest.file_digest", digest)
    assert export(tmp_path / name, tmp_path / "model.safetensors") == 2  # a weight and a bias
    assert verified == ["rank-0.safetensors"]
