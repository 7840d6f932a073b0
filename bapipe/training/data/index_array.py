"""Numbers of samples by 8 bytes each: Python's own integers, in a list, take 40."""

from array import array
from collections.abc import Sequence

from torch import Tensor


def index_array(indices: Tensor) -> Sequence[int]:
    """Returns the values of a tensor of int64, [samples], as integers of Python when they are read."""
    return array("q", indices.numpy().tobytes())
