"""A rank of a torchrun job whose second rank is killed at step 5 of the first attempt; the second has no end."""

import os
import signal
import sys
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import StepReport
from tests.multiprocess.fault_cases import plan_of, points, quiet


class Deadly(Dataset[tuple[Tensor, ...]]):
    """Kills rank 1 in its sixth step: it loads two samples twice to compare them, and the targets of 12 a step."""

    def __init__(self) -> None:
        self._points, self._asked = points(), 0

    def __len__(self) -> int:
        return 50

    def __getitem__(self, place: int) -> tuple[Tensor, ...]:
        self._asked += 1
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and self._asked > 4 + 60:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._points[place]


def tell(report: StepReport) -> None:
    print(f"{os.environ['TORCHELASTIC_RESTART_COUNT']}:{report.step}", flush=True)


if __name__ == "__main__":
    config = TrainConfig(steps=10**6, checkpoint=Path(sys.argv[1]), checkpoint_every=2, resume=True, timeout_s=30)
    train(plan_of(quiet, (3,), (0, 1)), quiet, Deadly(), config, on_step=tell)
