"""Sample indices in an array of 8 bytes each; a list of Python integers takes 40."""

from array import array
from collections.abc import Sequence

from torch import Tensor


def index_array(indices: Tensor) -> Sequence[int]:
    """Returns the values of an int64 tensor, [samples], as a sequence that yields Python integers when read."""
    return array("q", indices.numpy().tobytes())
