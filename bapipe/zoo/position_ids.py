"""Positions in a sequence, computed without its length as a Python number, which tracing would make a constant."""

import torch
from torch import Tensor


def position_ids(tensor: Tensor) -> Tensor:
    """Returns 0, 1, 2, ... along the second dimension of a tensor [n, length], int64."""
    return torch.ones_like(tensor, dtype=torch.int64).cumsum(1) - 1
