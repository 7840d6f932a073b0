"""An image file as a tensor: its centre, or a random crop."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from bapipe.errors import BapipeError, first_line

if TYPE_CHECKING:
    import PIL.Image

MAX_PIXELS = 2**26
"""Largest image that is decoded; it takes 200 MB."""

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What a file may hold, whatever its name is: pillow would hand PostScript to an interpreter."""

_MAX_DRAWS = 10
_MIN_AREA_SHARE = 0.08
_MAX_ASPECT = 4 / 3


def read_image(path: Path, image_size: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns [3, image_size, image_size] of an image, normalised as torchvision does for ImageNet.

    It is the largest centred square; with a generator, a random crop, mirrored with probability 1/2.

    Raises:
        BapipeError: it cannot be read.
    """
    whole, shape = _decoded(path), (image_size, image_size)
    from PIL import Image, ImageOps  # after `_decoded`, whose error says what to do without pillow

    if generator is None:
        piece = ImageOps.fit(whole, shape, Image.Resampling.BILINEAR)
    else:
        piece = whole.resize(shape, Image.Resampling.BILINEAR, box=random_box(*whole.size, generator))
        piece = ImageOps.mirror(piece) if torch.rand((), generator=generator) < 0.5 else piece
    pixels = torch.from_numpy(numpy.array(piece)).permute(2, 0, 1) / 255
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((pixels - mean[:, None, None]) / deviation[:, None, None]).contiguous()


def why_unreadable(path: Path) -> str:
    """Returns why a file cannot be read as an image; empty if it can be."""
    try:
        _decoded(path)
    except BapipeError as error:
        return str(error)
    return ""


def _decoded(path: Path) -> "PIL.Image.Image":
    """Returns an image of pillow in RGB."""
    try:
        from PIL import Image  # optional: other data sets do not need it
    except ImportError:
        raise BapipeError(
            "a folder's images are read with pillow, which is not installed: run `pip install pillow`"
        ) from None
    try:
        with Image.open(path, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ValueError(f"{width} x {height} pixels; want at most {MAX_PIXELS:,}")
            has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
            if image.mode in ("I", "F") and not has_16_bits:
                raise ValueError("its values have 32 bits, and what is white is not known")
            if has_16_bits:  # pillow would clip it to white, not scale it
                return Image.fromarray((numpy.asarray(image) >> 8).astype(numpy.uint8)).convert("RGB")
            return image.convert("RGB")
    except Exception as error:  # pillow's readers of damaged files raise errors of many types
        raise BapipeError(f"{path}: cannot be read as an image: {first_line(error)}; mend or remove it") from None


def random_box(width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Returns (left, top, right, bottom) of 8 to 100 % of an image, 3:4 to 4:3 (Szegedy et al. 2014, arXiv:1409.4842).

    If none of ten draws lies within the image, it is the largest centred square.
    """

    def draw(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))

    for _ in range(_MAX_DRAWS):
        area = width * height * draw(_MIN_AREA_SHARE, 1)
        aspect = math.exp(draw(-math.log(_MAX_ASPECT), math.log(_MAX_ASPECT)))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        left, top = int(draw(0, width - across + 1)), int(draw(0, height - down + 1))
        if 0 < across <= width and 0 < down <= height:
            return left, top, left + across, top + down
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side
