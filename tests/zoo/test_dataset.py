"""Data sets of a user's own class, which have some of the methods of `PipelineDataset`, and attributes of their own."""

from typing import Any

import pytest
from torch.utils.data import Dataset

from bapipe.errors import BapipeError
from bapipe.zoo.data.dataset import as_pipeline_dataset
from bapipe.zoo.data.open_dataset import augmented, without_unreadable


class Own(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return index, -index


class Named(Own):
    """Keeps values of its own under the names of methods."""

    text = "all of it"

    def __init__(self) -> None:
        self.part, self.forms, self.bucket_of = "train", ["go", "went"], (1, 2)
        self.reference = self.augmented = self.readable = self.at_epoch = lambda *_: 1 / 0


def test_attributes_are_no_methods() -> None:
    data = as_pipeline_dataset(Named())
    assert (data.part(3, 0), data.part(3, 1)) == (3, -3)
    assert data.bucket_shapes == ()
    assert data.bucket_of(3) == 0
    assert data.augmented() is None
    assert data.readable() is None
    assert data.at_epoch(1) is data
    assert not any(data.provides(name) for name in ("part", "text", "reference"))


def test_methods_are_used() -> None:
    class Shaped(Own):
        bucket_shapes = (((1,), ()), ((2,), ()))

        def bucket_of(self, index: int) -> int:
            return index % 2

        def part(self, index: int, place: int) -> int:
            return 10 * index + place

        def augmented(self) -> Own:
            return Own()

    data = as_pipeline_dataset(Shaped())
    assert data.provides("part")
    assert data.part(3, 1) == 31
    assert data.bucket_shapes == (((1,), ()), ((2,), ()))
    assert [data.bucket_of(index) for index in range(3)] == [0, 1, 0]
    crops = data.augmented()
    assert crops is not None
    assert crops[2] == (2, -2)


def test_none_is_no_augmented_and_no_readable_data() -> None:
    class Without(Own):
        def augmented(self) -> None:
            return None

        def readable(self) -> None:
            return None

    data = as_pipeline_dataset(Without())
    with pytest.raises(BapipeError, match=r"^data 'own' is no folder of images, so `augment` cannot"):
        augmented(data, True, "own")
    with pytest.raises(BapipeError, match=r"^data 'own' is no folder of images, so `skip_unreadable` has"):
        without_unreadable(data, True, "own")
