"""Exported weights: one safetensors file, of what such files can hold."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.export import export
from bapipe.training.checkpoint.manifest import MANIFEST, decode_manifest, encode_manifest
from bapipe.training.checkpoint.tensor_files import TensorSpec
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


@pytest.mark.parametrize("name", ["kept", "kept/step-000000001"])
def test_each_file_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A checkpoint may be of hundreds of gigabytes on a shared disk."""
    config = TrainConfig(steps=1, checkpoint=tmp_path / "kept")
    with only_rank():
        train(plan_of(one_layer, (), (0,)), one_layer, points(), config)
    verified: list[str] = []
    monkeypatch.setattr("bapipe.training.checkpoint.manifest._check_file", lambda path, name, _: verified.append(name))
    assert export(tmp_path / name, tmp_path / "model.safetensors") == 2  # a weight and a bias
    assert verified == ["rank-0.safetensors"]
