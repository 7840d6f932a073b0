"""Pieces of images: where they lie, that they are the same whenever an epoch is, and that they are what the image shows."""

import logging
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from bapipe.errors import BapipeError
from bapipe.training.checkpoint.manifest import Position
from bapipe.training.data.loader import batches
from bapipe.zoo.data import image_io
from bapipe.zoo.data.dataset import DatasetSubset, PipelineDataset
from bapipe.zoo.data.image_io import random_box, read_image
from bapipe.zoo.data.images import images
from bapipe.zoo.data.open_dataset import augmented, without_unreadable
from tests.models.loading import rank_parts


def test_boxes_lie_within_and_have_every_size() -> None:
    generator = torch.Generator().manual_seed(0)
    shares, oblong = [], []
    for _ in range(2000):
        left, top, right, bottom = random_box(300, 200, generator)
        assert 0 <= left < right <= 300
        assert 0 <= top < bottom <= 200
        shares.append((right - left) * (bottom - top) / (300 * 200))
        oblong.append((right - left) / (bottom - top))
    assert 0.075 < min(shares) < 0.1
    assert 0.8 < max(shares) <= 1
    assert 0.72 < min(oblong) < 0.8
    assert 1.25 < max(oblong) < 1.37
    assert random_box(1000, 10, generator) == (495, 0, 505, 10)  # nothing of that shape fits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four images whose red grows to the right and whose green grows downwards."""
    (tmp_path / "a").mkdir()
    red, green = numpy.meshgrid(numpy.arange(200), numpy.arange(160))
    picture = numpy.stack((red, green, 0 * red), axis=2).astype(numpy.uint8)
    for name in "0123":
        Image.fromarray(picture).save(tmp_path / "a" / f"{name}.png")
    return tmp_path


def shown(picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Red along a line and green along a column, in bytes."""
    return 255 * (picture[0, 16] * 0.229 + 0.485), 255 * (picture[1, :, 16] * 0.224 + 0.456)


def test_a_crop_equals_that_region_of_the_image(folder: Path) -> None:
    mirrored = 0
    for seed in range(40):
        piece = read_image(folder / "a" / "0.png", 32, torch.Generator().manual_seed(seed))
        left, top, right, bottom = random_box(200, 160, torch.Generator().manual_seed(seed))
        red, green = shown(piece)
        centres = (torch.arange(32) + 0.5) / 32
        assert (green - (top + (bottom - top) * centres - 0.5)).abs().max() < 2
        flipped = bool(red[0] > red[-1])
        mirrored += flipped
        across = red.flip(0) if flipped else red
        assert (across - (left + (right - left) * centres - 0.5)).abs().max() < 2
    assert 10 < mirrored < 30


def test_an_epoch_does_not_depend_on_when_it_is_requested(folder: Path) -> None:
    data = augmented(images(str(folder), image_size=32, num_classes=1), True, "it")
    asked = rank_parts("image", input_names=("image",))

    def first(epoch: int, of: PipelineDataset[Any]) -> torch.Tensor:
        feed = batches(asked, of, Position(step=epoch, epoch=epoch))
        image = next(feed).inputs[0]
        assert image is not None
        return image

    assert torch.equal(first(1, data), first(1, data))
    assert not torch.equal(first(1, data).sum(0), first(2, data).sum(0))
    assert (
        len({tuple(image.flatten().tolist()) for image in first(1, data)}) == 4
    )  # one image four times, cut otherwise
    assert torch.equal(first(1, DatasetSubset(data, range(4))), first(1, data))
    assert torch.equal(data[0][0], read_image(folder / "a" / "0.png", 32))  # where nothing is trained


def test_other_data_is_refused() -> None:
    made_up = images("synthetic", image_size=32, num_classes=3)
    assert augmented(made_up, False, "synthetic") is made_up
    with pytest.raises(BapipeError) as error:
        augmented(made_up, True, "synthetic")
    assert str(error.value) == "data 'synthetic' is no folder of images, so `augment` cannot draw pieces of them"


def test_hidden_folders_are_no_classes_and_folders_no_images(folder: Path) -> None:
    (folder / ".ipynb_checkpoints").mkdir()
    for name in ("sub.png", ".hidden"):
        (folder / "a" / name).mkdir()
    for name in (".hidden/0.png", "sub.png/0.png", "._0.png"):
        (folder / "a" / name).write_bytes((folder / "a" / "0.png").read_bytes())
    data = images(str(folder), image_size=8, num_classes=1)
    assert [int(label) for _, label in (data[place] for place in range(len(data)))] == [0] * 5


def test_grey_of_16_bits_is_scaled_to_8(tmp_path: Path) -> None:
    ramp = numpy.arange(0, 256, dtype=numpy.uint8).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "8.png")
    Image.fromarray(ramp.astype(numpy.uint16) * 257).save(tmp_path / "16.png")
    assert torch.equal(read_image(tmp_path / "16.png", 16), read_image(tmp_path / "8.png", 16))


def test_grey_images_of_32_bits_are_refused(tmp_path: Path) -> None:
    for name, dtype in (("whole.tif", numpy.int32), ("float.tif", numpy.float32)):
        Image.fromarray(numpy.ones((8, 8), dtype)).save(tmp_path / name)
        with pytest.raises(
            BapipeError, match=r"cannot be read as an image: its values have 32 bits, and what is white"
        ):
            read_image(tmp_path / name, 8)


def test_grey_portable_maps_of_16_bits_are_scaled(tmp_path: Path) -> None:
    (tmp_path / "16.pgm").write_bytes(b"P5 2 1 65535\n" + bytes([0x80, 0, 0xFF, 0xFF]))
    (tmp_path / "8.pgm").write_bytes(b"P5 2 1 255\n" + bytes([0x80, 0xFF]))
    assert torch.equal(read_image(tmp_path / "16.pgm", 1), read_image(tmp_path / "8.pgm", 1))


def test_images_that_cannot_be_read_are_left_out_if_wanted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "a" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"x" * 100)
    (folder / "a" / "3.png").write_bytes((folder / "a" / "0.png").read_bytes()[:300])
    whole = images(str(folder), image_size=32, num_classes=1)
    assert without_unreadable(whole, False, "x") is whole
    with caplog.at_level(logging.INFO, "bapipe.zoo"):
        readable = without_unreadable(whole, True, "x")
    assert len(readable) == 2
    assert torch.equal(readable[1][0], read_image(folder / "a" / "2.png", 32))
    assert f"2 of 4 images are left out; the first: {folder / 'a' / '1.png'}: cannot be read as" in caplog.text
    made_up = images("synthetic", image_size=32, num_classes=3)
    with pytest.raises(
        BapipeError, match=r"^data 'x' is no folder of images, so `skip_unreadable` has no file to leave"
    ):
        without_unreadable(made_up, True, "x")
    for path in (folder / "a").iterdir():
        path.write_bytes(b"")
    with pytest.raises(BapipeError, match=r"^none of 4 images can be read; the first: "):
        without_unreadable(whole, True, "x")


def test_an_image_of_too_many_pixels_is_not_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_io, "MAX_PIXELS", 31_999)
    with pytest.raises(BapipeError, match=r"cannot be read as an image: 200 x 160 pixels; want at most 31,999; mend"):
        read_image(folder / "a" / "0.png", 32)


def test_a_gpu_waits_for_images_made_up_and_a_cpu_does_not() -> None:
    made_up = images("synthetic", image_size=8, num_classes=2)
    assert (made_up.is_slow_to_load, made_up.is_slow_for_gpu) == (False, True)
    few = DatasetSubset(made_up, range(3))
    assert (few.is_slow_to_load, few.is_slow_for_gpu) == (False, True)
