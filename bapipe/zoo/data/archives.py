"""Reads the archives of data that packages ship: a table of digits, and a volume."""

import gzip
import zlib
from pathlib import Path

import numpy
import torch
from torch import Tensor

from bapipe.errors import BapipeError

_MAX_BYTES = 64 * 2**20
"""Most bytes that an archive is unpacked to: several times the largest that is known."""

_DIGIT_SIZE = 28
_NUM_SIDES = 3


def digits(path: Path) -> tuple[Tensor, Tensor]:
    """Returns images of digits, uint8 [count, 28, 28], and which digit each is, int64 [count].

    The archive is a table with the brightness of each pixel of an image, and its digit, on a line.

    Raises:
        BapipeError: it is damaged.
    """
    content = _unpacked(path)
    try:
        table = numpy.loadtxt(content.decode().splitlines(), delimiter=",", dtype=numpy.uint8, ndmin=2)
        pixels, classes = table[:, :-1].reshape(-1, _DIGIT_SIZE, _DIGIT_SIZE), table[:, -1]
    except (ValueError, OverflowError) as error:
        raise _damaged(path, str(error)) from None
    if len(table) == 0 or classes.max() > 9:
        raise _damaged(path, "there are no digits in it, or numbers above 9")
    return torch.from_numpy(pixels), torch.from_numpy(classes).long()


def volume(path: Path) -> Tensor:
    """Returns a volume of bytes, uint8 [x, y, z]; the archive's NIfTI header gives its sides and where it starts.

    Raises:
        BapipeError: it is damaged.
    """
    content = _unpacked(path)
    try:
        sides = [int(n) for n in numpy.frombuffer(content, dtype="<i2", count=_NUM_SIDES, offset=42)]
        start = int(numpy.frombuffer(content, dtype="<f4", count=1, offset=108)[0])
        if min(sides) <= 0 or start < 0:
            raise ValueError(f"sides of {sides} from byte {start} on")
        voxels = numpy.frombuffer(content, dtype=numpy.uint8, offset=start).reshape(sides, order="F")
    except (ValueError, OverflowError) as error:
        raise _damaged(path, str(error)) from None
    return torch.from_numpy(numpy.array(voxels, order="C"))


def _unpacked(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, str(error)) from None
    if len(content) > _MAX_BYTES:
        raise _damaged(path, f"it unpacks to more than {_MAX_BYTES} bytes")
    return content


def _damaged(path: Path, reason: str) -> BapipeError:
    return BapipeError(f"{path}: a damaged archive ({reason[:200]}): install its package again")
