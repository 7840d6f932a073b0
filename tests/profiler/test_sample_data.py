"""The samples that a model is measured on."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bapipe
from bapipe.profiler.sample_data import MADE_UP, REPEATED, Samples, samples_for
from bapipe.zoo.data.open_dataset import synthetic_data
from bapipe.zoo.example import Example
from tests.models.small_zoo import small

CPU = torch.device("cpu")


class Words(nn.Module):
    """Refuses words of 5 and more if it is particular."""

    def __init__(self, is_particular: bool = False) -> None:
        super().__init__()
        self.is_particular, self.words, self.head = is_particular, nn.Embedding(50, 4), nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        if self.is_particular and not torch.compiler.is_compiling() and bool((words >= 5).any()):
            raise ValueError("want words below 5")
        scores: Tensor = self.head(self.words(words).mean(1))
        return scores


EXAMPLES = torch.tensor([[0, 1, 2]]), torch.tensor([1])


def samples(module: nn.Module, data: Any = None) -> Samples:
    example = Example(module=module, inputs=EXAMPLES[:1], target=EXAMPLES[1], loss=nn.functional.cross_entropy)
    made_up = synthetic_data(example, "words") if data is None else data
    return samples_for(module, EXAMPLES, made_up, nn.functional.cross_entropy, CPU)


def test_samples_differ_and_are_the_same_each_time() -> None:
    found = samples(Words())
    assert found.name == MADE_UP
    words, target = found.batch(16, CPU)
    assert (words.shape, target.tolist()) == ((16, 3), [1] * 16)
    assert len(set(words.flatten().tolist())) > 20
    assert torch.equal(words[:4], found.batch(4, CPU)[0])


def test_a_model_that_fails_on_made_up_samples_gets_its_example() -> None:
    found = samples(Words(is_particular=True))
    assert found.name == REPEATED
    assert found.batch(2, CPU)[0].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_samples_of_another_shape_are_not_used() -> None:
    other = Example(module=Words(), inputs=(torch.tensor([[0, 1]]),), target=EXAMPLES[1], loss=nn.functional.nll_loss)
    assert samples(Words(), synthetic_data(other, "words")).name == REPEATED


def test_a_data_function_that_fails_leaves_no_data() -> None:
    def fail(spec: str) -> Any:
        raise ZeroDivisionError(spec)

    example = Example(
        module=Words(), inputs=EXAMPLES[:1], target=EXAMPLES[1], loss=nn.functional.cross_entropy, data=fail
    )
    assert synthetic_data(example, "words") is None


def test_a_profile_says_what_its_samples_were() -> None:
    module = Words()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    made = bapipe.profile(module, EXAMPLES[:1], EXAMPLES[1], nn.functional.cross_entropy, microbatch_sizes=(2,))
    assert made.environment["data"] == MADE_UP
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("name", ["gpt2", "gnmt8", "vgg16", "bert_large", "resnet50", "unet3d", "two_tower"])
def test_the_models_of_the_zoo_take_their_synthetic_data(name: str) -> None:
    example = small(name)
    call = partial(samples_for, example.module, (*example.tensors, example.target))
    assert call(synthetic_data(example, name), example.loss, CPU).name == MADE_UP
