"""The worker of test_replica_state.py: a pipeline whose last stage has replicas, with a loss that keeps values."""

import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.runtime.pipeline import Pipeline
from bapipe.training.launch.worker import Rank
from tests.multiprocess.runtime_cases import make_plan


class Normalised(nn.Module):
    """A loss divided by its running mean."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(output, target)
        self.mean.mul_(0.5).add_(loss.detach(), alpha=0.5)
        return loss / self.mean


def refused(rank: Rank) -> str | None:
    """Returns why the first step is refused; None if it is not."""
    plan = make_plan(["0"], (), ((0, 1),), [["0F0", "0B0"], ["0F1", "0B1"]], 2, 2)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    pipeline = Pipeline(nn.Sequential(nn.Linear(3, 2)), plan, loss=Normalised(), inputs=[x])
    try:
        pipeline.step(x, target=y)
    except InvalidModel as error:
        return str(error)
    return None
