"""Data that a model is not trained on, to evaluate it on."""

from typing import Any

import torch
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.runtime.rng import derived_seed
from bapipe.torch_device import CPU
from bapipe.training.data.index_array import index_array
from bapipe.zoo.data.dataset import DatasetSubset, PipelineDataset, as_pipeline_dataset

_ITEMS_PER_HELD_OUT_ITEM = 10
"""One in this many items is held out for evaluation, if the data set has no `held_out`."""


def hold_out(
    dataset: PipelineDataset[Any], seed: int, max_samples: int | None
) -> tuple[PipelineDataset[Any], PipelineDataset[Any]]:
    """Returns the data to train on, and at most `max_samples` items to evaluate on, drawn from the seed.

    The latter are from the data's `held_out`, all of it if `max_samples` is None. Data without `held_out` is split:
    `max_samples` or a tenth of it is evaluated on, the rest is trained on.

    Raises:
        BapipeError: nothing would be left to train on, or `held_out` is no data set, or is empty.
    """
    if dataset.held_out is not None:
        validation = as_pipeline_dataset(dataset.held_out, "`held_out` of the data")
        num = len(validation)
        if num == 0:
            raise BapipeError("`held_out` of the data has no samples: give it some, or train without `evaluate_every`")
        if max_samples is None or max_samples >= num:
            return dataset, validation
        return dataset, _subset(validation, _shuffled(num, seed)[:max_samples])
    num = len(dataset)
    size = max(1, num // _ITEMS_PER_HELD_OUT_ITEM) if max_samples is None else min(max_samples, num)
    if size == num:
        raise BapipeError(
            f"the data has {num} samples, and evaluation takes {size} of them away: give more data, or a smaller "
            "`evaluate_samples`"
        )
    order = _shuffled(num, seed)
    return _subset(dataset, order[size:]), _subset(dataset, order[:size])


def _shuffled(num: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(derived_seed(seed, "held out"))
    return torch.randperm(num, generator=generator, device=CPU)


def _subset(dataset: PipelineDataset[Any], indices: Tensor) -> DatasetSubset:
    """Returns some items, in the order that they have in the data set."""
    return DatasetSubset(dataset, index_array(indices.sort().values))
