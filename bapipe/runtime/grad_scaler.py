"""Gradients of scaled losses, which float16 needs because small ones would be zero in it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def unscale(gradients: Iterable[Tensor], factor: float, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Divides gradients by the factor of their losses; returns whether those of all ranks are finite.

    Every rank of the group calls it together, and gets the same, so that all update their parameters or none does.
    """
    finite = torch.ones((), dtype=torch.int32, device=device)
    for gradient in gradients:
        gradient.mul_(1.0 / factor)
        finite *= gradient.isfinite().all()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
    return bool(finite.item())
