"""Labels that a loss may ignore are found in its code, in what it reaches, and among the targets."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bapipe.equivalence.ignored_labels import labels_in_code, labels_that_stand_out, with_label
from bapipe.equivalence.loss_state import state_of_loss

PADDING = 21


def by_number(scores: Tensor, target: Tensor) -> Tensor:
    return scores[target != 17].mean()


def by_global(scores: Tensor, target: Tensor) -> Tensor:
    return scores[target != PADDING].mean()


def by_default(scores: Tensor, target: Tensor, padding: int = 17) -> Tensor:
    return scores[target != padding].mean()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pad_idx, self.width = 17, 31

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return scores[target != self.pad_idx].mean()


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.CrossEntropyLoss(ignore_index=17)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        value = self.words(scores, target)
        assert isinstance(value, Tensor)
        return value


def of_closure(padding: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores, target: scores[target != padding].mean()


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        (by_number, 17),
        (by_global, PADDING),
        (by_default, 17),
        (of_closure(17), 17),
        (partial(cross_entropy, ignore_index=17), 17),
        (nn.CrossEntropyLoss(ignore_index=17), 17),
        (Masked(), 17),
        (Several(), 17),
        (Several().forward, 17),
    ],
)
def test_labels_are_found_where_a_loss_names_them(loss: Callable[[Tensor, Tensor], Tensor], label: int) -> None:
    found = labels_in_code(state_of_loss(loss, nn.Module()))
    assert label in found.ignored
    assert 31 not in (*found.ignored, *found.others)


def test_the_padding_of_a_model_is_one() -> None:
    model = nn.Sequential(nn.Embedding(20, 4, padding_idx=17), nn.Conv1d(4, 4, 3, padding=2))
    assert labels_in_code(state_of_loss(nn.MSELoss(), model)).ignored == (17,)


def test_other_numbers_of_code_are_tried_in_the_range_of_classes_alone() -> None:
    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return scores.log_softmax(-1)[target.ne(1)].reshape(-1, 300).mean()

    found = labels_in_code(state_of_loss(loss, nn.Module()))
    assert found.ignored == ()
    assert found.that_may_be_among(torch.tensor([5, 2])) == [1]


def test_frequent_and_extreme_labels_stand_out() -> None:
    words = torch.tensor([[7, 5, 9, 1], [7, 3, 1, 1], [6, 3, 8, 2], [4, 3, 3, 2]])
    assert labels_that_stand_out(words) == [1, 9, 3, 7, 1]
    assert set(labels_that_stand_out(torch.tensor([4, 255, 4, 0]))) == {0, 4, 255}


def test_a_label_fills_one_sample_if_its_type_can_hold_it() -> None:
    target = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    found = [(other.tolist(), value, is_held) for other, value, is_held in with_label(target, (4, 255, -100, 4, 999))]
    assert found == [([[4, 4], [3, 4]], 4, True), ([[255, 255], [3, 4]], 255, False)]
