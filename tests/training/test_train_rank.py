"""The training of one rank, in this process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file

from bapipe.formats.prediction import NO_MEMORY, Prediction, RankPrediction
from bapipe.training import train_rank
from bapipe.training.checkpoint.manifest import Position
from bapipe.training.checkpoint.writer import AGAIN_S
from bapipe.training.step_reports import StepReports
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from tests.multiprocess.fault_cases import points, quiet
from tests.training.checkpoint.cases import example, go, only_rank, plan


def test_free_memory_is_compared_with_what_the_plan_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(train_rank, "check_free_memory", lambda *given: asked.append(given))
    of_rank = RankPrediction(device="cpu0", busy_ns=1, idle_ns=0, sync_ns=0, peak_bytes=5, memory=NO_MEMORY)
    prediction = Prediction(step_ns=1, samples_per_s=1.0, bubble=0.0, ranks=(of_rank,))
    with only_rank():
        judged = structs.replace(plan(), prediction=prediction)
        train(judged, quiet, points(), TrainConfig(steps=1), example=example())
    assert asked == [(torch.device("cpu"), "cpu0", 5)]


def test_a_run_that_resumes_does_not_begin_with_its_weights_again(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    generator = torch.Generator().manual_seed(1)
    shapes = {name: tensor.shape for name, tensor in example().module.state_dict().items()}
    save_file({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, weights)
    unbroken = go(tmp_path / "unbroken", 4, weights=weights)
    first = go(tmp_path / "resumed", 2, weights=weights)
    second = go(tmp_path / "resumed", 4, weights=weights)
    assert first.losses + second.losses == unbroken.losses
    assert unbroken.losses != go(tmp_path / "other", 4).losses


def test_what_an_optimizer_draws_does_not_depend_on_where_a_run_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, drawn = torch.optim.Adam.step, list[float]()

    def noisy_step(optimizer: torch.optim.Adam, *given: Any) -> Any:
        drawn.append(torch.rand(()).item())
        return step(optimizer, *given)

    monkeypatch.setattr(torch.optim.Adam, "step", noisy_step)
    go(tmp_path / "unbroken", 4)
    unbroken, drawn[:] = drawn[:], []
    go(tmp_path / "resumed", 2)
    go(tmp_path / "resumed", 4)
    assert drawn[:2] + drawn[-2:] == unbroken  # between them, optimizers of tiny parameters show what a state holds
    assert len(set(unbroken)) == 4


def test_a_signal_in_the_last_step_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect = StepReports.collect
    monkeypatch.setattr(StepReports, "collect", lambda reports, ahead_ns: (collect(reports, ahead_ns)[0], 15))
    assert len(go(tmp_path, 1).losses) == 1


@pytest.mark.parametrize(("timeout_s", "again_s"), [(8.0, 2.0), (1e6, AGAIN_S)])
def test_a_second_try_to_write_ends_well_before_ranks_that_wait_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float, again_s: float
) -> None:
    monkeypatch.setattr(train_rank, "CheckpointWriter", lambda *given, **_: given)
    rank: Any = SimpleNamespace(index=1, group_timeout=None, device=None, note_meeting=None)
    job: Any = SimpleNamespace(config=TrainConfig(checkpoint=tmp_path, timeout_s=timeout_s), devices=())
    made: Any = train_rank._checkpoint_writer(rank, job, Position())
    assert made[5] == again_s
