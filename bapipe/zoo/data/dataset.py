"""The interface of a data set for the runtime: `torch.utils.data.Dataset` with a length, and optional methods."""

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from torch.utils.data import Dataset

from bapipe.errors import BapipeError

BucketShape = tuple[tuple[int, ...], ...]
"""The shape of each part of an item: of the inputs in order, then of the target."""

NUM_SYNTHETIC = 10_000
"""Length of every data set that is made up: `synthetic`, `brain`, and those like an example."""

Item = TypeVar("Item", covariant=True)


class PipelineDataset(Dataset[Item]):
    """A data set that a pipeline is trained on; all but `__len__` and `__getitem__` has a default.

    Items are `(input, target)`, or `((input, ...), target)` for a model of several inputs. The parts of an item are
    its inputs, numbered from 0, and its target, whose number is the number of inputs. They may draw from the global
    generators of torch, Python and numpy, which are seeded for each item.

    Training also takes data sets of any other class with `__len__` and `__getitem__`, see `as_pipeline_dataset`; of
    the methods below, it may define any.
    """

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def part(self, index: int, place: int) -> Any:
        """Returns part `place` of item `index`.

        Override it if parts can be loaded separately; each rank then loads only the parts that its stages use.
        """
        return item_parts(self[index])[place]

    @property
    def held_out(self) -> "Dataset[Any] | None":
        """Separate data to evaluate on; None if part of this data is to be held out instead."""
        return None

    def at_epoch(self, epoch: int) -> "PipelineDataset[Item]":
        """Returns the data of one pass; it differs from pass to pass if there is random augmentation."""
        return self

    @property
    def bucket_shapes(self) -> tuple[BucketShape, ...]:
        """The shapes that items are cropped to, smallest first, the last one the plan's; empty without buckets."""
        return ()

    def bucket_of(self, index: int) -> int:
        """Returns the number of the smallest bucket that an item fits."""
        return 0

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens that the model generated."""
        raise NotImplementedError

    def reference(self, index: int) -> str:
        """Returns the text that the model should generate for an item."""
        raise NotImplementedError

    def augmented(self) -> "PipelineDataset[Item] | None":
        """Returns the data with random augmentation; None if it has none."""
        return None

    def readable(self) -> "PipelineDataset[Item] | None":
        """Returns the data without items whose files cannot be read; None if it reads no file for each item."""
        return None

    @property
    def is_slow_to_load(self) -> bool:
        """Whether items are slow to load, such as images to decode, so that worker processes load them by default."""
        return False

    @property
    def is_slow_for_gpu(self) -> bool:
        """Whether a GPU would train on items in less time than it takes to load them, such as images made up."""
        return self.is_slow_to_load

    def provides(self, name: str) -> bool:
        """Returns whether the data set has its own version of one of the methods above."""
        return getattr(type(self), name) is not getattr(PipelineDataset, name)


class WrappedDataset(PipelineDataset[Any]):
    """A data set that delegates to another; subclasses override some methods."""

    def __init__(self, dataset: PipelineDataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def part(self, index: int, place: int) -> Any:
        return self.dataset.part(index, place)

    @property
    def held_out(self) -> Dataset[Any] | None:
        return self.dataset.held_out

    def at_epoch(self, epoch: int) -> PipelineDataset[Any]:
        return self.dataset.at_epoch(epoch)

    @property
    def bucket_shapes(self) -> tuple[BucketShape, ...]:
        return self.dataset.bucket_shapes

    def bucket_of(self, index: int) -> int:
        return self.dataset.bucket_of(index)

    def text(self, tokens: Sequence[int]) -> str:
        return self.dataset.text(tokens)

    def reference(self, index: int) -> str:
        return self.dataset.reference(index)

    def augmented(self) -> PipelineDataset[Any] | None:
        return self.dataset.augmented()

    def readable(self) -> PipelineDataset[Any] | None:
        return self.dataset.readable()

    @property
    def is_slow_to_load(self) -> bool:
        return self.dataset.is_slow_to_load

    @property
    def is_slow_for_gpu(self) -> bool:
        return self.dataset.is_slow_for_gpu

    def provides(self, name: str) -> bool:
        return self.dataset.provides(name)


class DatasetSubset(WrappedDataset):
    """Some items of a data set, renumbered as in `torch.utils.data.Subset`, with the methods of `PipelineDataset`."""

    def __init__(self, dataset: PipelineDataset[Any], indices: Sequence[int]) -> None:
        super().__init__(dataset)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]

    def part(self, index: int, place: int) -> Any:
        return self.dataset.part(self.indices[index], place)

    @property
    def held_out(self) -> Dataset[Any] | None:
        return None

    def at_epoch(self, epoch: int) -> "DatasetSubset":
        return DatasetSubset(self.dataset.at_epoch(epoch), self.indices)

    def bucket_of(self, index: int) -> int:
        return self.dataset.bucket_of(self.indices[index])

    def reference(self, index: int) -> str:
        return self.dataset.reference(self.indices[index])

    def augmented(self) -> PipelineDataset[Any] | None:
        whole = self.dataset.augmented()
        return None if whole is None else DatasetSubset(whole, self.indices)


class _Adapted(PipelineDataset[Any]):
    """A data set of a user's own class; the one place that looks for optional methods by name."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def part(self, index: int, place: int) -> Any:
        return self.dataset.part(index, place) if self.provides("part") else super().part(index, place)

    @property
    def held_out(self) -> Dataset[Any] | None:
        return cast("Dataset[Any] | None", getattr(self.dataset, "held_out", None))

    def at_epoch(self, epoch: int) -> PipelineDataset[Any]:
        return as_pipeline_dataset(self.dataset.at_epoch(epoch)) if self.provides("at_epoch") else self

    @property
    def bucket_shapes(self) -> tuple[BucketShape, ...]:
        return tuple(getattr(self.dataset, "bucket_shapes", ()))

    def bucket_of(self, index: int) -> int:
        return int(self.dataset.bucket_of(index)) if self.provides("bucket_of") else super().bucket_of(index)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.dataset.text(tokens))

    def reference(self, index: int) -> str:
        return str(self.dataset.reference(index))

    def augmented(self) -> PipelineDataset[Any] | None:
        found = self.dataset.augmented() if self.provides("augmented") else None
        return None if found is None else as_pipeline_dataset(found)

    def readable(self) -> PipelineDataset[Any] | None:
        found = self.dataset.readable() if self.provides("readable") else None
        return None if found is None else as_pipeline_dataset(found)

    @property
    def is_slow_to_load(self) -> bool:
        return bool(getattr(self.dataset, "is_slow_to_load", False))

    @property
    def is_slow_for_gpu(self) -> bool:
        return bool(getattr(self.dataset, "is_slow_for_gpu", self.is_slow_to_load))

    def provides(self, name: str) -> bool:
        # A method of its class: data sets keep values of their own under names as common as `part` and `text`.
        return callable(getattr(type(self.dataset), name, None))


def as_pipeline_dataset(dataset: object, source: str = "the data") -> PipelineDataset[Any]:
    """Returns `dataset` itself if it is a `PipelineDataset`, else an adapter.

    Args:
        source: what the error calls it.

    Raises:
        BapipeError: it has no length, or no items by number.
    """
    if isinstance(dataset, PipelineDataset):
        return dataset
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise BapipeError(
            f"{source} is of type {type(dataset).__name__}; want a data set with a length and items by number, "
            "(input, target) or ((input, ...), target)"
        )
    return _Adapted(dataset)


def item_parts(item: Any) -> tuple[Any, ...]:
    """Returns the inputs of an item and its target as one tuple."""
    inputs, target = item
    return (*inputs, target) if isinstance(inputs, tuple | list) else (inputs, target)
