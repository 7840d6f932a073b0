"""Made-up data of any model: like its example inputs, and within the range that its embeddings allow."""

import pickle
import random

import pytest
import torch
from torch import Tensor, nn

from bapipe.zoo.data.like_example import LikeExample, like_example
from bapipe.zoo.data.open_dataset import open_data


class Reader(nn.Module):
    """Reads words, in chunks, with positions; the mask and the picture select nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.small, self.places = nn.Embedding(9, 4), nn.Embedding(7, 4), nn.Embedding(3, 4)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, words: Tensor, places: Tensor, mask: Tensor, picture: Tensor, twice: bool = False) -> Tensor:
        read = self.words(words) + self.small(words[:, :]) + self.places(places.view(-1, 3))
        return self.norm(read * (mask.unsqueeze(2) + int(twice)) + picture.mean())


MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
INPUTS = (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64), MASK, torch.rand(2, 50) + 5)
TARGET = torch.tensor([[0.0, 1.0], [1.0, 0.0]])


def made() -> LikeExample:
    return like_example(Reader(), INPUTS, TARGET, (*INPUTS, True))


def test_integers_are_within_the_smallest_embedding_and_masks_are_the_examples() -> None:
    items = [made()[i] for i in range(200)]
    words, places, masks, pictures = (
        torch.stack(parts) for parts in zip(*(inputs for inputs, _ in items), strict=True)
    )
    assert (words.min().item(), words.max().item()) == (0, 6)
    assert (places.min().item(), places.max().item()) == (0, 2)
    assert {tuple(mask) for mask in masks.tolist()} == {(1, 1, 1), (1, 0, 0)}
    assert pictures.mean().item() == pytest.approx(INPUTS[3].mean().item(), abs=0.02)
    assert pictures.std().item() == pytest.approx(INPUTS[3].std().item(), rel=0.05)
    assert {tuple(target.tolist()) for _, target in items} == {(0.0, 1.0), (1.0, 0.0)}
    assert all(a.dtype == b.dtype for a, b in zip((words, places, masks, pictures), INPUTS, strict=True))


def test_items_depend_on_their_number_alone_and_the_module_stays_as_it_was() -> None:
    module = Reader()
    data = like_example(module, INPUTS, TARGET, INPUTS)
    assert module.norm.num_batches_tracked == 0
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(data[7][0][0], again[7][0][0])
    assert torch.equal(data.part(7, 4), again[7][1])
    with pytest.raises(IndexError):
        data[len(data)]


class Changing(nn.Module):
    """Changes its weights, a counter, a list and Python's random numbers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, max_norm=0.5)
        self.num_calls, self.seen = 0, list[float]()

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        self.num_calls += 1
        self.seen.append(random.random())
        return self.words(words) * mask.unsqueeze(2)


def test_making_data_leaves_parameters_attributes_and_random_numbers_as_they_were() -> None:
    module, inputs = Changing(), (torch.arange(10).view(2, 5), torch.ones(2, 5))
    weight, drawn = module.words.weight.detach().clone(), random.getstate()
    assert like_example(module, inputs, TARGET, inputs).num_rows == {0: 10}
    assert torch.equal(module.words.weight, weight)
    assert (module.num_calls, module.seen, random.getstate()) == (0, [], drawn)


def test_of_inputs_that_are_views_of_one_tensor_only_those_that_select_rows_are_drawn() -> None:
    words, mask = torch.stack((torch.arange(10).view(2, 5), torch.ones(2, 5, dtype=torch.int64)))
    by_name = {"words": words, "mask": mask}
    for call in ((words, mask), by_name):
        assert like_example(Changing(), (words, mask), TARGET, call).num_rows == {0: 10}


def test_a_model_that_fails_gives_rows_of_its_example() -> None:
    class Failing(nn.Module):
        def forward(self, words: Tensor) -> Tensor:
            raise RuntimeError("no")

    data = like_example(Failing(), INPUTS[:1], TARGET, INPUTS[:1])
    assert data.num_rows == {}
    assert not data[3][0][0].any()


def test_synthetic_data_are_there_for_models_whose_own_data_know_none() -> None:
    def folder(spec: str) -> LikeExample:
        raise FileNotFoundError(spec)

    assert isinstance(open_data("synthetic", None, "own:net", made), LikeExample)
    assert isinstance(open_data("synthetic", folder, "own:net", made), LikeExample)
    with pytest.raises(FileNotFoundError):
        open_data("pictures", folder, "own:net", made)
