"""Parameters that several stages use, such as tied embeddings: their gradients are summed before the update."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


class TiedGradients:
    """The parameters of this process that stages of other processes use too, each with the group of its users."""

    def __init__(self, users: Sequence[tuple[nn.Parameter, dist.ProcessGroup]]) -> None:
        self._users = tuple(users)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose gradients `sum` adds up."""
        return tuple(parameter for parameter, _ in self._users)

    def sum(self) -> None:
        """Adds up the gradients of all processes that use a parameter; each gets the same sum.

        A parameter for which none has a gradient keeps none, so that optimizers skip it, as in one process.
        """
        for parameter, group in self._users:
            # A stage may not have used its copy in this step, but every process of the group must join the all-reduce.
            has_grad = parameter.grad is not None
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # The all-reduce adds elements in memory order; W leaves a gradient transposed in memory if the stage uses
            # the transposed weight.
            summed = (grad.to_dense() if grad.is_sparse else grad).contiguous()
            num_with_grad = torch.full((), int(has_grad), dtype=torch.int32, device=parameter.device)
            dist.all_reduce(summed, group=group)
            dist.all_reduce(num_with_grad, group=group)
            if has_grad or num_with_grad.item():  # reading waits for the device
                parameter.grad = summed
