"""A run that is asked to stop leaves what the run that resumes can do, and keeps its last step."""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from bapipe.errors import Stopped
from bapipe.training.checkpoint.folder import list_checkpoints
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import Evaluation
from tests.multiprocess.fault_cases import points, quiet
from tests.training.checkpoint.cases import example, only_rank, plan


def test_a_signal_during_an_evaluation_does_not_wait_for_its_end(tmp_path: Path) -> None:
    """It would leave too little time for the checkpoint. The run that resumes makes the evaluation up, and the last one ends."""
    config = TrainConfig(steps=4, checkpoint=tmp_path, resume=True, evaluate_every=2, evaluate_samples=30)
    seen: list[int] = []
    done: list[int] = []

    def on_evaluation(num_done: int, _: int, evaluation: Evaluation | None) -> None:
        seen.append(num_done)
        done.extend([] if evaluation is None else [evaluation.steps])
        if num_done == 12 and (len(seen) == 2 or 2 in done):
            os.kill(os.getpid(), signal.SIGTERM)

    with only_rank():
        with pytest.raises(Stopped) as caught:
            train(plan(), quiet, points(), config, example=example(), on_evaluation=on_evaluation)
        dist.destroy_process_group()
        assert str(caught.value) == (
            "stopped by SIGTERM after 2 steps, of which there is a checkpoint: continue with `resume`"
        )
        assert (seen, done) == ([0, 12], [])
        assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000002"]
        result = train(plan(), quiet, points(), config, example=example(), on_evaluation=on_evaluation)
    assert [evaluation.steps for evaluation in result.evaluations] == done == [2, 4]
