"""Figures on held-out data: BLEU and top-1 worked out by hand, and what is held out."""

import math
from typing import Any

import pytest
import torch

from bapipe.errors import BapipeError
from bapipe.training.data.validation_split import hold_out
from bapipe.training.evaluate.evaluate import EvaluationData, check_scores
from bapipe.zoo.data.dataset import DatasetSubset, PipelineDataset, as_pipeline_dataset
from bapipe.zoo.metrics import bleu, top_1
from tests.models.small_zoo import build_on_meta


def test_bleu_by_hand() -> None:
    # 5 of 6 words, 3 of 5 pairs, 1 of 4 threes; of the 3 fours none, which counts as half a one
    expected = 100 * (5 / 6 * 3 / 5 * 1 / 4 * (1 / 2) / 3) ** (1 / 4)
    assert bleu(["the cat is on the mat"], ["the cat sat on the mat"]) == pytest.approx(expected)
    # all of it right, but 5 words for 6
    assert bleu(["a b c d e"], ["a b c d e f"]) == pytest.approx(100 * math.exp(1 - 6 / 5))
    # over all sentences, not the mean of each: 9 of 10 words, 7 of 8 pairs, 5 of 6 threes, 3 of 4 fours
    both = 100 * (9 / 10 * 7 / 8 * 5 / 6 * 3 / 4) ** (1 / 4)
    assert bleu(["a b c d e", "f g h i x"], ["a b c d e", "f g h i j"]) == pytest.approx(both)
    assert bleu(["same here now ok ."], ["same here now ok ."]) == pytest.approx(100)


def test_bleu_without_sacrebleu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    example = build_on_meta("bapipe.zoo.gnmt:gnmt", {"num_pairs": 2, "hidden_size": 4, "vocabulary_size": 9})
    with pytest.raises(BapipeError) as error:
        check_scores(EvaluationData(dataset=as_pipeline_dataset([]), metrics={}, generation=example.generation))
    assert str(error.value) == (
        "BLEU is computed with sacrebleu, which is not installed: pip install sacrebleu, or train without `evaluate_every`"
    )


def test_data_without_texts_is_refused() -> None:
    example = build_on_meta("bapipe.zoo.gnmt:gnmt", {"num_pairs": 2, "hidden_size": 4, "vocabulary_size": 9})
    with pytest.raises(BapipeError) as error:
        check_scores(EvaluationData(dataset=as_pipeline_dataset([]), metrics={}, generation=example.generation))
    assert str(error.value) == (
        "what this model generates cannot be scored, because the data has no 'text': see bapipe.Example, or train without "
        "`evaluate_every`"
    )


def test_top_1() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.0], [3.0, 2.0, 1.0], [0.0, 0.0, 1.0]])
    assert top_1(scores, torch.tensor([1, 2, 2])).tolist() == [1.0, 0.0, 1.0]


class Items(list[Any]):
    held_out: Any = None


def items(numbers: range) -> PipelineDataset[Any]:
    return as_pipeline_dataset(Items(numbers))


def numbers(data: Any) -> list[int]:
    return [data[i] for i in range(len(data))]


@pytest.mark.parametrize(("most", "size"), [(None, 4), (7, 7), (1, 1)])
def test_some_samples_are_held_out(most: int | None, size: int) -> None:
    training, others = hold_out(items(range(40)), 3, most)
    assert len(numbers(others)) == size
    assert sorted(numbers(training) + numbers(others)) == list(range(40))
    again = hold_out(items(range(40)), 3, most)[1]
    assert numbers(again) == numbers(others)
    if size > 1:
        assert numbers(hold_out(items(range(40)), 4, most)[1]) != numbers(others)
        assert max(numbers(others)) > size  # not the first ones, which may be all of a class


def test_data_may_hold_out_its_own() -> None:
    own = Items(range(20))
    own.held_out = list(range(100, 130))
    data = as_pipeline_dataset(own)
    training, others = hold_out(data, 3, None)
    assert training is data
    assert numbers(others) == list(range(100, 130))
    training, others = hold_out(data, 3, 5)
    assert training is data
    assert len(numbers(others)) == 5
    assert set(numbers(others)) <= set(range(100, 130))


def test_held_out_is_a_data_set() -> None:
    own = Items(range(20))
    own.held_out = 0.1
    with pytest.raises(BapipeError) as error:
        hold_out(as_pipeline_dataset(own), 3, None)
    assert str(error.value) == (
        "`held_out` of the data is of type float; want a data set with a length and items by number, (input, target) or "
        "((input, ...), target)"
    )


def test_all_of_the_data_cannot_be_held_out() -> None:
    with pytest.raises(BapipeError) as error:
        hold_out(items(range(40)), 3, 50)
    assert str(error.value) == (
        "the data has 40 samples, and evaluation takes 40 of them away: give more data, or a smaller `evaluate_samples`"
    )


def test_single_inputs_are_loaded_if_the_data_set_supports_it() -> None:
    class Parted(Items):
        def part(self, index: int, place: int) -> tuple[int, int]:
            return index, place

    separate = DatasetSubset(as_pipeline_dataset(Parted(range(9))), [5, 7])
    assert separate.provides("part")
    assert separate.part(1, 2) == (7, 2)
    assert not DatasetSubset(items(range(9)), [5, 7]).provides("part")
