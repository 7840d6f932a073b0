"""The values and bytes of a gradient, also of a sparse one, as of an embedding with `sparse=True`."""

from torch import Tensor


def gradient_values(gradient: Tensor) -> Tensor:
    """Returns a gradient's values, of a sparse one those that it holds: torch has no norm of a sparse tensor itself.

    A row that was looked up several times has several values until they are summed, as they are here.
    """
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def gradient_bytes(gradient: Tensor) -> int:
    """Returns the bytes of a gradient; of a sparse one those of its values and indices, once they are summed."""
    if not gradient.is_sparse:
        return gradient.nbytes
    summed = gradient.coalesce()
    return summed.values().nbytes + summed.indices().nbytes
