"""Mini-batches of items of similar sizes, for data whose items are padded to several lengths."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bapipe.torch_device import CPU
from bapipe.zoo.data.dataset import BucketShape, PipelineDataset


def bucket_of_batch(dataset: PipelineDataset[Any], indices: Sequence[int]) -> int | None:
    """Returns the index of the smallest bucket that fits all given items; None for the largest, the planned one."""
    num_buckets = len(dataset.bucket_shapes)
    if num_buckets == 0:
        return None
    bucket = max((dataset.bucket_of(index) for index in indices), default=0)
    return bucket if bucket + 1 < num_buckets else None


def bucket_examples(inputs: Sequence[Tensor], shapes: BucketShape) -> tuple[Tensor, ...]:
    """Returns examples of a model's inputs with the shapes of a bucket."""
    input_shapes = shapes[: len(inputs)]
    return tuple(x.new_zeros((x.shape[0], *shape)) for x, shape in zip(inputs, input_shapes, strict=True))


def crop(batch: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns the first `shape` elements of each item of a batch."""
    return batch[(slice(None), *(slice(size) for size in shape))].contiguous()


def bucketed_order(
    buckets: Sequence[int], order: Sequence[int], batch_size: int, generator: torch.Generator
) -> list[int]:
    """Returns items in an order whose mini-batches each hold items of similar sizes; the mini-batches are shuffled.

    `buckets` are the items' buckets, `order` is any order of the items. Items of a bucket that do not fill a mini-batch
    join the next larger bucket, so that no more items are left out than without buckets; those left out come last.
    """
    batches: list[list[int]] = []
    remaining: list[int] = []
    for bucket in sorted(set(buckets)):
        remaining += [index for index in order if buckets[index] == bucket]
        num_full = len(remaining) // batch_size * batch_size
        batches += [remaining[start : start + batch_size] for start in range(0, num_full, batch_size)]
        remaining = remaining[num_full:]
    shuffled = torch.randperm(len(batches), generator=generator, device=CPU).tolist()
    return [index for number in shuffled for index in batches[number]] + remaining
