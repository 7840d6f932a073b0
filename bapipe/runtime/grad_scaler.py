"""Dynamic loss scaling for float16, whose small gradients would underflow to zero, over all ranks of a pipeline.

It works as `torch.amp.GradScaler` with its defaults. But there each process decides alone whether to skip a step; the
ranks of a pipeline must decide together.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.runtime.gradient_values import gradient_values

GROWTH_INTERVAL = 2_000
"""Consecutive steps with finite gradients after which the scale is doubled."""


class GradScalerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of dynamic loss scaling, with torch's names; checkpoints call its fields `factor` and `good_steps`.

    Attributes:
        scale: what losses are multiplied by.
        growth_tracker: steps since the scale last changed, all with finite gradients.
    """

    scale: Annotated[float, msgspec.Meta(gt=0)] = msgspec.field(default=65_536.0, name="factor")
    growth_tracker: Annotated[int, msgspec.Meta(ge=0, lt=GROWTH_INTERVAL)] = msgspec.field(default=0, name="good_steps")

    def after_step(self, finite: bool) -> "GradScalerState":
        """Returns the next state: half the scale if a gradient was not finite, twice after `GROWTH_INTERVAL` steps."""
        if not finite:
            return GradScalerState(scale=self.scale / 2)
        if self.growth_tracker + 1 == GROWTH_INTERVAL:
            return GradScalerState(scale=self.scale * 2)
        return GradScalerState(scale=self.scale, growth_tracker=self.growth_tracker + 1)


def unscale(gradients: Iterable[Tensor], scale: float, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Divides gradients by the loss scale, in place; returns whether those of all ranks are finite.

    Every rank of the group calls it together and gets the same answer, so that either all update their parameters or
    none does.
    """
    finite = torch.ones((), dtype=torch.int32, device=device)
    for gradient in gradients:
        gradient.mul_(1.0 / scale)
        finite *= gradient_values(gradient).isfinite().all()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
    return bool(finite.item())
