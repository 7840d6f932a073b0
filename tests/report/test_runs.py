"""A run in words."""

from dataclasses import replace
from functools import cache

import pytest

import bapipe
from bapipe.report.runs import evaluation_words, render_run, run_figures, run_json
from bapipe.training.train_result import Evaluation, TrainResult
from tests.builders import MS, chain, devices


def test_shares_are_in_per_cent_and_scores_as_they_are() -> None:
    evaluation = Evaluation(steps=3, num_samples=8, loss=0.5, metrics=(("top-1", 0.25), ("bleu", 12.34)), elapsed_ns=1)
    assert evaluation_words(evaluation) == "held-out loss 0.5000, top-1 25.0%, bleu 12.3"


@cache
def plan() -> bapipe.Plan:
    return bapipe.make(chain([4, 4]), devices(2), cuts=["l1"], minibatch_size=2, microbatch_size=1)


def result(slowdowns: tuple[float, float], data_ns: int = 0) -> TrainResult:
    """A run whose devices computed so many times as long as predicted."""
    timeline = bapipe.simulate(plan(), chain([4, 4]))
    spans = [
        span._replace(
            start_ns=int(span.start_ns * 10), end_ns=int(span.start_ns * 10 + slow * (span.end_ns - span.start_ns))
        )
        for span in timeline.spans
        for slow in [slowdowns[span.rank]]
    ]
    step_ns = 80 * MS
    return TrainResult(
        losses=(1.0, 0.5),
        step_ns=(step_ns,) * 2,
        data_ns=(data_ns,) * 2,
        as_planned=(True,) * 2,
        devices=("d0", "d1"),
        peak_bytes=(1, 1),
        timeline=replace(timeline, spans=tuple(spans)),
        order=((), ()),
    )


@pytest.mark.parametrize(
    ("slowdowns", "words"),
    [
        ((1.0, 1.1), []),
        (
            (3.5, 3.5),
            [
                "every device computed 3.5 times as long as predicted: this machine was busy with other programs, or is slower than when the layers were measured"
            ],
        ),
        (
            (3.0, 3.5),
            [
                "every device computed 3.0 to 3.5 times as long as predicted: this machine was busy with other programs, or is slower than when the layers were measured"
            ],
        ),
        ((1.0, 2.5), ["d1 computed 2.5 times as long as predicted, the others 1.0 times"]),
    ],
)
def test_a_busy_machine_is_told_from_one_slow_device(slowdowns: tuple[float, float], words: list[str]) -> None:
    assert run_json(plan(), result(slowdowns))["remarks"] == words
    assert [part for part in render_run(plan(), result(slowdowns)) if isinstance(part, str)][1:] == words


def test_throughput_counts_the_wait_for_data() -> None:
    waited = result((1.0, 1.0), data_ns=20 * MS)
    assert run_figures(plan(), waited)["samples/s"][1] == pytest.approx(20.0)
    assert run_json(plan(), waited)["remarks"] == [
        "waiting for data took 20% of the time, 20.0 ms before each step: more processes that load it (`data_workers`) or items that take less time to load may help"
    ]
    assert run_json(plan(), result((1.0, 1.0), data_ns=4 * MS))["remarks"] == []
