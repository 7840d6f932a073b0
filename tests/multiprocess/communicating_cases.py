"""The worker of test_communicating.py, and models whose forwards communicate."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.equivalence.outcome import Loss
from bapipe.errors import BapipeError
from bapipe.runtime.pipeline import Pipeline
from bapipe.training.launch.worker import Rank
from tests.multiprocess.runtime_cases import make_plan, named_order


class Centered(nn.Module):
    """Subtracts the mean over the samples of all processes of a group, as layers for data parallelism do."""

    group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if dist.is_initialized():
            dist.all_reduce(mean, group=self.group)
        return x - mean


def two_stages(
    module: nn.Module, *, loss: Loss = mse_loss, ranks: tuple[int, int] = (0, 1), **options: Any
) -> Pipeline:
    """Returns a pipeline of three modules in a row, the last in a stage of its own."""
    orders = named_order("gpipe", 2, 2)
    plan = make_plan(["0", "1", "2"], (2,), ranks, [orders[ranks.index(rank)] for rank in (0, 1)], 2, 2)
    return Pipeline(module, plan, loss=loss, inputs=(torch.ones(2, 4),), **options)


def model(second: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), second, nn.Linear(4, 4))


def refusal(_: Rank) -> str:
    """Returns what a pipeline of a model says that communicates in its forward."""
    try:
        two_stages(model(Centered()))
    except BapipeError as error:
        return str(error)
    return ""
