"""Parameters that several stages use, such as tied embeddings: their gradients are summed before the update."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


class SharedGradients:
    """The parameters of this process that stages of other processes use too, each with the group of all who do."""

    def __init__(self, summed: Sequence[tuple[nn.Parameter, dist.ProcessGroup]]) -> None:
        self._summed = tuple(summed)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose gradients `sum` adds up."""
        return tuple(parameter for parameter, _ in self._summed)

    def sum(self) -> None:
        """Adds up the gradients of all processes that use a parameter; each gets the same sum."""
        for parameter, group in self._summed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
