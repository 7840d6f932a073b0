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


class SumsLater(nn.Module):
    """Starts to sum over all processes in its second forward, or in its first backward, without waiting for it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.num_forwards = where, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        if self.where == "forward" and self.num_forwards == 2:
            self._sum(x.detach())
        if self.where == "backward" and x.requires_grad:
            x.register_hook(self._sum)
        return x * 2

    def _sum(self, x: Tensor) -> None:
        dist.all_reduce(x.clone(), async_op=True)


def refusal_of_a_step(_: Rank, where: str) -> float | None:
    """Makes a step of a pipeline in which the first process communicates."""
    tensor = torch.ones(4, 4)
    pipeline = two_stages(model(SumsLater(where)), check=False)
    return pipeline.step(tensor, target=tensor)


def refusal(_: Rank) -> str:
    """Returns what a pipeline of a model says that communicates in its forward."""
    try:
        two_stages(model(Centered()))
    except BapipeError as error:
        return str(error)
    return ""
