"""A run in words."""

from bapipe.report.runs import evaluation_words
from bapipe.runtime.train_result import Evaluation


def test_shares_are_in_per_cent_and_scores_as_they_are() -> None:
    evaluation = Evaluation(steps=3, num_samples=8, loss=0.5, metrics=(("top-1", 0.25), ("bleu", 12.34)), elapsed_ns=1)
    assert evaluation_words(evaluation) == "held-out loss 0.5000, top-1 25.0%, bleu 12.3"
