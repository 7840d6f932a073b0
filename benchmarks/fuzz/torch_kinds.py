"""The kinds of files whose readers need torch: checkpoints, weights, and pictures."""

from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save
from torch import nn

from bapipe.training.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    Manifest,
    MinibatchSize,
    Position,
    checkpoint_name,
    encode_manifest,
    file_name,
    read_manifest,
)
from bapipe.training.checkpoint.tensor_files import file_digest, stored_specs
from bapipe.training.checkpoint.weights import check_weights, load_weights
from bapipe.zoo.data.image_io import read_image
from benchmarks.fuzz.kinds import Kind, WrongSuccess

_STEPS = 3
_PICTURE_SIZE = 8
_PICTURE_KINDS = ("png", "jpeg", "gif", "bmp", "ppm", "tiff")


def torch_kinds(folder: Path) -> tuple[Kind, ...]:
    """Returns the kinds; makes an intact checkpoint in a folder."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    tensors = save({MODEL + name: tensor for name, tensor in state.items()})
    manifest = _manifest(folder, tensors)

    def use_manifest(path: Path) -> None:
        _use_checkpoint(path.parent, path.read_bytes(), tensors)
        if path.read_bytes() != manifest:
            raise WrongSuccess("a changed manifest was read")

    def use_tensors(path: Path) -> None:
        _use_checkpoint(path.parent, manifest, path.read_bytes())
        if path.read_bytes() != tensors:
            raise WrongSuccess("changed tensors were read")

    def use_weights(path: Path) -> None:
        check_weights(path, module)
        load_weights(path, {name: torch.empty_like(tensor) for name, tensor in state.items()})

    return (
        Kind(name="manifest", seeds=(manifest,), use=use_manifest),
        Kind(name="tensors", seeds=(tensors,), use=use_tensors),
        Kind(name="weights", seeds=(save(state),), use=use_weights),
        Kind(name="picture", seeds=tuple(map(_picture, _PICTURE_KINDS)), use=_use_picture),
    )


def _manifest(folder: Path, tensors: bytes) -> bytes:
    """Returns the manifest of a checkpoint of some tensors."""
    file = folder / file_name(0)
    file.write_bytes(tensors)
    return encode_manifest(
        Manifest(
            model="m",
            optimizer="sgd",
            seed=0,
            num_samples=8,
            minibatch_sizes=(MinibatchSize(from_step=0, num_samples=2),),
            position=Position(step=_STEPS, epoch=0, offset=2 * _STEPS),
            plan=None,
            versions={"bapipe": "1"},
            tensors={name.removeprefix(MODEL): spec for name, spec in stored_specs(file).items()},
            optimizer_tensors={},
            optimizer_numbers={},
            files={file.name: file_digest(file)},
        )
    )


def _use_checkpoint(folder: Path, manifest: bytes, tensors: bytes) -> None:
    checkpoint = folder / checkpoint_name(_STEPS)
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / MANIFEST).write_bytes(manifest)
    (checkpoint / file_name(0)).write_bytes(tensors)
    read_manifest(checkpoint)


def _picture(kind: str) -> bytes:
    file = BytesIO()
    Image.effect_noise((24, 16), 50).convert("RGB").save(file, kind)
    return file.getvalue()


def _use_picture(path: Path) -> None:
    found = read_image(path, _PICTURE_SIZE)
    if tuple(found.shape) != (3, _PICTURE_SIZE, _PICTURE_SIZE) or not bool(found.isfinite().all()):
        raise WrongSuccess(f"a picture of shape {tuple(found.shape)}")
