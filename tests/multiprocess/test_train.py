"""Training by a plan learns, is repeatable, and measures what it says."""

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import Dataset

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.formats.settings import Settings
from bapipe.tracing.layers import trace
from bapipe.training.train import train
from bapipe.training.train_config import TrainConfig
from bapipe.training.train_result import Evaluation, StepReport
from tests.multiprocess.launch_cases import clusters, counting, in_evaluation_mode, small
from tests.multiprocess.runtime_cases import make_plan, named_order

TRAINING = TrainConfig(steps=24, learning_rate=0.1, seed=3, timeout_s=60)


def _plan(cuts: tuple[int, ...]) -> Plan:
    layers = [layer.name for layer in trace(small().module).layers]
    ranks = range(len(cuts) + 1)
    return make_plan(layers, cuts, ranks, named_order("1f1b", len(ranks), 4), 4, 4)


def test_training_does_not_depend_on_the_cut() -> None:
    reports: list[StepReport] = []
    told: list[tuple[int, int, Evaluation | None]] = []
    data = clusters()
    data.held_out = torch.utils.data.Subset(clusters(), range(19))  # type: ignore[attr-defined]
    two = train(
        _plan((3,)),
        small,
        data,
        replace(TRAINING, evaluate_every=10, report_every=7),
        on_step=reports.append,
        on_evaluation=lambda *what: told.append(what),
    )
    one = train(_plan(()), small, clusters(), TRAINING)
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
    assert two.losses[-1] < two.losses[0] / 2
    assert [report.step for report in reports] == list(range(24))
    assert tuple(report.loss for report in reports) == two.losses
    assert tuple(report.step_ns for report in reports) == two.step_ns
    assert all(0 < report.bubble < 1 for report in reports)
    assert [found.steps for found in two.evaluations] == [10, 20, 24]
    assert two.evaluations[-1].loss < two.evaluations[0].loss
    assert [found for _, _, found in told if found is not None] == list(two.evaluations)
    assert [(done, of) for done, of, _ in told[:4]] == [(0, 19), (16, 19), (19, 19), (19, 19)]
    assert {report.devices for report in reports} == {two.devices}
    assert {report.learning_rate for report in reports} == {0.1}
    assert all(
        a is not None and b is not None and 0 < a <= b
        for a, b in zip(reports[-1].peak_bytes, two.peak_bytes, strict=True)
    )
    assert two.devices == ("cpu0", "cpu1")
    assert tuple(tuple(map(str, order)) for order in two.order) == _plan((3,)).order
    assert all(peak is not None and 0 < peak < 2**30 for peak in two.peak_bytes)
    assert 0 < two.timeline.step_ns <= two.step_ns[-1] * 1.5
    for rank, order in enumerate(two.order):
        spans = [span for span in two.timeline.spans if span.rank == rank]
        assert tuple(span.action for span in spans) == order
        assert all(0 <= a.start_ns <= a.end_ns <= b.start_ns for a, b in pairwise(spans))


def test_a_run_that_resumes_where_an_evaluation_is_due_begins_with_it(tmp_path: Path) -> None:
    """It may have been cut off: checkpoints are written before."""
    config = replace(TRAINING, steps=2, evaluate_every=2, checkpoint=tmp_path / "kept")
    begun = train(_plan(()), small, clusters(), config)
    resumed = train(_plan(()), small, clusters(), replace(config, steps=3, resume=True))
    assert len(resumed.losses) == 1
    assert [found.steps for found in resumed.evaluations] == [2, 3]
    assert resumed.evaluations[0].loss == begun.evaluations[0].loss


@dataclass
class Resampled(Dataset[Any]):
    """Items drawn from those of `clusters`, with a generator of its own if there is one."""

    generator: random.Random | None = None
    items: Any = field(default_factory=clusters)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, _: int) -> Any:
        draw = random.random if self.generator is None else self.generator.random
        return self.items[int(draw() * len(self))]


def test_random_items_do_not_depend_on_the_cut(caplog: pytest.LogCaptureFixture) -> None:
    short = replace(TRAINING, steps=4)
    one, two = (train(_plan(cuts), small, Resampled(), short).losses for cuts in ((), (3,)))
    assert two == pytest.approx(one, abs=1e-5)
    assert "another sample 0" not in caplog.text
    train(_plan((3,)), small, Resampled(random.Random(0)), replace(TRAINING, steps=1))
    assert "the data give another sample 0 each time that it is loaded" in caplog.text


def test_a_model_in_evaluation_mode_trains_in_training_mode() -> None:
    plan = make_plan(["0", "1"], (), (0,), named_order("1f1b", 1, 4), 4, 4)
    assert train(plan, in_evaluation_mode, clusters(), TrainConfig(steps=1, timeout_s=60)).losses == (2.0,)


def test_a_rank_has_as_many_threads_as_asked_for() -> None:
    plan = msgspec.structs.replace(_plan(()), settings=Settings(threads=2))
    assert train(plan, counting, clusters(), TrainConfig(steps=1, timeout_s=60)).losses == (2.0,)


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (
            torch.utils.data.TensorDataset(torch.zeros(2, 5), torch.zeros(2)),
            r"^data 'synthetic, held out' gives input 0",
        ),
        ([], r"^`held_out` of the data has no samples"),
    ],
)
def test_held_out_data_are_checked_before_training(held_out: Any, message: str) -> None:
    data = clusters()
    data.held_out = held_out  # type: ignore[attr-defined]
    with pytest.raises(BapipeError, match=message):
        train(_plan(()), small, data, replace(TRAINING, evaluate_every=20))


def test_too_little_data_is_refused() -> None:
    data = torch.utils.data.Subset(clusters(), range(15))
    with pytest.raises(BapipeError, match=r"^the data has 15 samples, less than a mini-batch of 16: give more data"):
        train(_plan((3,)), small, data, TrainConfig(steps=1))


def test_a_plan_of_cpus_and_gpus_together_is_refused() -> None:
    """So all ranks agree, by their kind of device, on the steps between two reports."""
    plan = _plan((3,))
    first, second = plan.cluster.devices
    mixed = msgspec.structs.replace(plan.cluster, devices=(first, msgspec.structs.replace(second, kind="cuda")))
    with pytest.raises(BapipeError, match=r"^the plan's devices are of kind cpu, cuda; torch can run a plan of kind"):
        train(msgspec.structs.replace(plan, cluster=mixed), small, clusters(), TRAINING)
