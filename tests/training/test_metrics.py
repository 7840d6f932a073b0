"""A metric gives a value for each sample."""

import pytest
import torch

from bapipe.errors import BapipeError, InvalidModel
from bapipe.training.evaluate.evaluate import EvaluationData, _of_each_sample, check_scores
from bapipe.zoo.data.dataset import as_pipeline_dataset


def test_a_value_for_each_sample_is_taken_as_it_is() -> None:
    values = torch.tensor([True, False, True])
    assert _of_each_sample("top-1", values, 3) is values


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (torch.tensor(0.5), r"shape \(\)"),
        (torch.ones(3, 6), r"shape \(3, 6\)"),
        (torch.ones(2), r"shape \(2,\)"),
        (0.5, "float 0.5"),
    ],
)
def test_other_values_are_refused(values: object, found: str) -> None:
    with pytest.raises(InvalidModel, match=rf"^metric 'mean' gives {found} for 3 samples: want a tensor with a value"):
        _of_each_sample("mean", values, 3)


def test_names_of_what_is_reported_beside_metrics_are_refused() -> None:
    data = EvaluationData(
        dataset=as_pipeline_dataset([(torch.zeros(1), 0)]),
        metrics={"loss": lambda output, target: output},
        generation=None,
        max_length=0,
        seed=0,
    )
    with pytest.raises(BapipeError, match=r"^a metric is named 'loss', as something else that is reported"):
        check_scores(data)
