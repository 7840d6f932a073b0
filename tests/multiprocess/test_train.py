"""Training by a plan learns, is repeatable, and measures what it says."""

from itertools import pairwise

import pytest
import torch
from launch_cases import clusters, small
from runtime_cases import make_plan, named_order

from bapipe.errors import BapipeError
from bapipe.outcome import StepReport
from bapipe.plan import Plan
from bapipe.runtime.train import train
from bapipe.trace import trace
from bapipe.training import Training

TRAINING = Training(steps=24, learning_rate=0.1, seed=3)


def _plan(cuts: tuple[int, ...]) -> Plan:
    layers = [layer.name for layer in trace(small().module).layers]
    ranks = range(len(cuts) + 1)
    return make_plan(layers, cuts, ranks, named_order("1f1b", len(ranks), 4), 4, 4)


def test_training_does_not_depend_on_the_cut() -> None:
    reports: list[StepReport] = []
    two = train(_plan((3,)), small, clusters(), TRAINING, timeout_s=60, on_step=reports.append)
    one = train(_plan(()), small, clusters(), TRAINING, timeout_s=60)
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
    assert two.losses[-1] < two.losses[0] / 2
    assert [report.step for report in reports] == list(range(24))
    assert tuple(report.loss for report in reports) == two.losses
    assert tuple(report.step_ns for report in reports) == two.step_ns
    assert all(0 < report.bubble < 1 for report in reports)
    assert two.devices == ("cpu0", "cpu1")
    assert tuple(tuple(map(str, order)) for order in two.order) == _plan((3,)).order
    assert all(peak is not None and 0 < peak < 2**30 for peak in two.peak_bytes)
    assert 0 < two.timeline.step_ns <= two.step_ns[-1] * 1.5
    for rank, order in enumerate(two.order):
        spans = [span for span in two.timeline.spans if span.rank == rank]
        assert tuple(span.action for span in spans) == order
        assert all(0 <= a.start_ns <= a.end_ns <= b.start_ns for a, b in pairwise(spans))


def test_too_little_data_is_refused() -> None:
    data = torch.utils.data.Subset(clusters(), range(15))
    with pytest.raises(BapipeError, match=r"^the data has 15 samples, less than a mini-batch of 16: give more data"):
        train(_plan((3,)), small, data, Training(steps=1))
