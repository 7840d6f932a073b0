"""Parts that train without their dropout."""

import pytest
from torch import nn

from bapipe.module_state.modes import enter_training_mode, idle_dropout, is_evaluating


class Classifier(nn.Module):
    """A loaded model, in evaluation mode as libraries give it, with a head."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.Dropout(probability)).eval()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(2, 2)


def test_dropout_of_a_part_in_evaluation_mode_is_told() -> None:
    module = Classifier(0.1)
    enter_training_mode(module)
    assert (idle_dropout(module) or "").startswith("'encoder' is in evaluation mode, so its dropout does nothing")
    assert idle_dropout(module.train()) is None


@pytest.mark.parametrize(
    "module",
    [
        Classifier(0.0),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval(), nn.Dropout(0.1)),
        nn.Sequential(Classifier(0.1).encoder.requires_grad_(False), nn.Linear(2, 2)),  # frozen, such as a teacher
    ],
    ids=["no dropout", "batch norm", "frozen"],
)
def test_what_has_none_or_is_frozen_is_fine(module: nn.Module) -> None:
    assert idle_dropout(module) is None


def test_a_model_is_put_in_training_mode_only_if_all_of_it_is_in_evaluation_mode() -> None:
    loaded = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).eval()
    enter_training_mode(loaded)
    assert all(part.training for part in loaded.modules())
    frozen = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1)), nn.Linear(2, 2)).eval()
    frozen[1].train()
    enter_training_mode(frozen)
    assert [name for name, part in frozen.named_modules() if part.training] == ["1"]
    assert (idle_dropout(frozen) or "").startswith("the model is in evaluation mode, so its dropout does nothing")


def test_parts_without_state_do_not_tell_the_mode_of_a_model() -> None:
    loaded = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Dropout(0.1)).eval()
    assert is_evaluating(loaded)
    loaded.append(nn.MSELoss())
    assert loaded[3].training
    assert is_evaluating(loaded)
    loaded[2].train()  # Monte Carlo dropout
    assert not is_evaluating(loaded)
