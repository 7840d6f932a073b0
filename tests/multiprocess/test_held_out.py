"""Loss, metrics and BLEU on held-out data are those of the whole model in one process, however it is cut."""

import math

import pytest
import torch

from bapipe.training.launch.processes import launch
from bapipe.zoo.gnmt import smoothed_loss
from bapipe.zoo.metrics import bleu
from tests.multiprocess.held_out_cases import NUM, PLANS, Outcome, run, sentences, translator


@pytest.fixture(scope="module")
def outcomes() -> list[list[Outcome]]:
    return launch(run, ["cpu0", "cpu1"], timeout_s=60)


def greedy() -> list[list[int]]:
    """What the model writes, one sentence at a time, from prefixes as long as they are."""
    example = translator()
    model, data = example.module.eval(), sentences(example)
    texts = []
    for i in range(NUM):
        source, length, _ = data[i][0]
        prefix = [2]
        while len(prefix) <= 6 and prefix[-1] != 3:
            scores = model(source[None], length[None], torch.tensor([prefix]))
            prefix.append(int(scores[0, -1].argmax()))
        texts.append(prefix[1:])
    return texts


@torch.no_grad()
def test_translations_equal_those_of_the_whole_model(outcomes: list[list[Outcome]]) -> None:
    example = translator()
    model, data = example.module.eval(), sentences(example)
    losses = [smoothed_loss(model(*(x[None] for x in data[i][0])), data[i][1][None]) for i in range(NUM)]
    texts = greedy()
    assert len({len(text) for text in texts}) > 1  # of which some end early
    assert len({tuple(text) for text in texts}) > 3
    said = [" ".join(str(word) for word in text if word != 3 and 0 not in text) for text in texts]
    for rank in outcomes:
        for place in range(0, 2 * len(PLANS), 2):
            found = rank[place].found
            assert (found.steps, found.num_samples) == (5, NUM)
            assert found.loss == pytest.approx(sum(map(float, losses)) / NUM, rel=1e-5)
            expected_bleu = bleu([data.text(t) for t in texts], [data.reference(i) for i in range(NUM)])
            assert dict(found.metrics) == pytest.approx({"BLEU": expected_bleu})
            assert rank[place].words == [text + [0] * (6 - len(text)) for text in texts[:4]]
    assert [data.text(text) for text in texts] == said


def test_metrics_are_those_of_every_sample(outcomes: list[list[Outcome]]) -> None:
    right = math.log(math.e + 2) - 1  # the scores are 1 for one class and 0 for the others
    wrong = math.log(math.e + 2)
    for rank in outcomes:
        for place in range(1, 2 * len(PLANS), 2):
            found = rank[place].found
            assert dict(found.metrics) == pytest.approx({"top-1": 4 / 7})
            assert found.loss == pytest.approx((4 * right + 3 * wrong) / 7, rel=1e-4)
            assert rank[place].told == [4, 7] * 2
            assert rank[place].again.metrics == found.metrics
            assert rank[place].again.loss == found.loss
