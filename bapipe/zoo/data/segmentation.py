"""Images and volumes with a class for each pixel: synthetic balls, digits, and a real brain."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bapipe.errors import BapipeError
from bapipe.zoo.data.archives import volume
from bapipe.zoo.data.dataset import NUM_SYNTHETIC
from bapipe.zoo.data.images import Images, images

Pair = tuple[Tensor, Tensor]
"""(image [channels, *shape], classes [*shape] int64)"""

_KNOWN = "want synthetic or {}, or write a factory of your own whose Example opens it"
_MAX_BALLS = 3
_PARTS = ("t1", "gm", "wm")
"""Brightness, and likelihoods of grey and of white matter, in bytes."""


def segmentation_pairs(spec: str, *, shape: tuple[int, ...], channels: int, num_classes: int) -> Dataset[Pair]:
    """Returns pairs of a noisy image or volume and the class of each of its pixels; class 0 is the background.

    `spec` is `synthetic` (balls, whose brightness tells their class), for images also `mnist` (5,000 digits, the pixels
    of the digit being class 1), and for volumes also `brain` (pieces of the MNI152 average of 152 brains, class 1 grey
    and class 2 white matter).

    Raises:
        BapipeError: no such data, or more classes than the model has.
    """
    if spec == "synthetic":
        return _Balls(shape=shape, channels=channels, num_classes=num_classes)
    if spec == "mnist" and len(shape) == 2:
        digits = images("mnist", image_size=shape[0], num_classes=10)
        return _Outlined(digits=digits, channels=channels)
    if spec == "brain" and len(shape) == 3:
        return _brain(shape, channels, num_classes)
    real = "mnist" if len(shape) == 2 else "brain"
    raise BapipeError(f"data '{spec}' is unknown to this model: {_KNOWN.format(real)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Balls(Dataset[Pair]):
    """Up to three balls in noise, each of one class; pixels of class k are 2k brighter. Item i depends on i alone."""

    shape: tuple[int, ...]
    channels: int
    num_classes: int

    def __len__(self) -> int:
        return NUM_SYNTHETIC

    def __getitem__(self, index: int) -> Pair:
        generator = _generator(index)
        sides = [torch.arange(side) / side for side in self.shape]
        grid = torch.stack(torch.meshgrid(*sides, indexing="ij"))
        classes = torch.zeros(self.shape, dtype=torch.int64)
        for _ in range(_MAX_BALLS):
            centre = torch.rand(len(self.shape), *(1 for _ in self.shape), generator=generator)
            radius = 0.1 + 0.25 * torch.rand((), generator=generator)
            kind = torch.randint(1, self.num_classes, (), generator=generator)
            classes = torch.where((grid - centre).square().sum(0) < radius**2, kind, classes)
        noise = torch.randn(self.channels, *self.shape, generator=generator)
        return noise + 2 * classes, classes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outlined(Dataset[Pair]):
    """Digits in noise, and the mask of their pixels."""

    digits: Images
    channels: int

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> Pair:
        digit = self.digits.part(index, 0)[0]
        noise = torch.randn(self.channels, *digit.shape, generator=_generator(index))
        return digit + noise, (digit > 1).long()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces(Dataset[Pair]):
    """Cubes from anywhere in one volume, with noise; item i depends on i alone.

    Brightness and classes are stored as bytes, because both are sent to every rank; brightness is then scaled to the
    given mean and deviation.
    """

    brightness: Tensor
    mean: float
    deviation: float
    classes: Tensor
    shape: tuple[int, ...]
    channels: int

    def __len__(self) -> int:
        return NUM_SYNTHETIC

    def __getitem__(self, index: int) -> Pair:
        generator = _generator(index)
        cube = tuple(
            slice(start, start + size)
            for size, whole in zip(self.shape, self.classes.shape, strict=True)
            for start in (int(torch.randint(whole - size + 1, (), generator=generator)),)
        )
        noise = 0.1 * torch.randn(self.channels, *self.shape, generator=generator)
        return (self.brightness[cube] - self.mean) / self.deviation + noise, self.classes[cube].long()


def _generator(index: int) -> torch.Generator:
    if not 0 <= index < NUM_SYNTHETIC:
        raise IndexError(index)
    return torch.Generator().manual_seed(index)


def _brain(shape: tuple[int, ...], channels: int, num_classes: int) -> _Pieces:
    if num_classes < 3:
        raise BapipeError(f"data 'brain' has 3 classes, the model {num_classes}: build it with num_classes=3 or more")
    brightness, grey, white = (_nifti(f"mni_icbm152_{part}_tal_nlin_sym_09a_converted.nii.gz") for part in _PARTS)
    unlikely = torch.full_like(grey, 127)
    classes = torch.stack((unlikely, grey, white)).argmax(0).to(torch.uint8)  # a tissue that is more likely than not
    head = brightness[brightness > 0].double()
    if any(size > whole for size, whole in zip(shape, classes.shape, strict=True)):
        raise BapipeError(
            f"data 'brain' is of {' x '.join(map(str, classes.shape))} voxels: build the model with volume_size="
            f"{min(classes.shape) // 8 * 8} or less"
        )
    return _Pieces(
        brightness=brightness,
        mean=head.mean().item(),
        deviation=head.std().item(),
        classes=classes,
        shape=shape,
        channels=channels,
    )


def _nifti(name: str) -> Tensor:
    """Returns a volume of bytes that the package nilearn ships."""
    package = find_spec("nilearn")  # located but not imported: its dependencies need not be installed
    folders = package.submodule_search_locations if package else None
    path = Path(folders[0], "datasets", "data", name) if folders else None
    if path is None or not path.exists():
        raise BapipeError(
            "data 'brain' is read from the package nilearn, which is not installed: run `pip install --no-deps nilearn`"
        )
    return volume(path)
