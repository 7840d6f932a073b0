"""Every random partition of every model gives the whole model's loss, gradients and buffers."""

import pytest
import torch
from torch import Tensor

from tests.models.random_partitions import check
from tests.models.small_zoo import SMALL, small, without_dropout
from tests.models.transformers_models import MODELS

pytestmark = pytest.mark.usefixtures("one_thread")


def _double(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)


ZOO = sorted(set(SMALL) - {"bert_large", "gnmt8", "gnmt16"})
"""One of each kind: the others differ from these in their sizes alone."""


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_in_random_stages(name: str) -> None:
    torch.manual_seed(0)
    example = small(name)
    rows = torch.arange(4) % len(example.target)
    module = without_dropout(example.module).double()
    inputs = _double(tuple(tensor[rows] for tensor in example.tensors))
    (target,) = _double((example.target[rows],))
    assert check(module, inputs, target, example.loss, range(5)) >= 3


@pytest.mark.parametrize("name", MODELS)
def test_transformers_in_random_stages(name: str) -> None:
    torch.manual_seed(0)
    module, inputs, target, loss = MODELS[name]()
    assert check(module.double().train(), _double(inputs), target, loss, range(5)) >= 3
