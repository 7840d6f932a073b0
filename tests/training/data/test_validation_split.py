"""Which samples are held out, and what knowing them takes."""

import pickle
import tracemalloc

import torch
from torch.utils.data import TensorDataset

from bapipe.runtime.rng import derived_seed
from bapipe.training.checkpoint.manifest import Position
from bapipe.training.data.loader import MinibatchSampler
from bapipe.training.data.validation_split import hold_out
from bapipe.zoo.data.dataset import as_pipeline_dataset


def test_a_tenth_is_held_out_and_both_parts_keep_their_order() -> None:
    data = as_pipeline_dataset(TensorDataset(torch.arange(50), torch.arange(50)))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(derived_seed(7, "held out"))).tolist()
    parts = hold_out(data, 7, None)
    assert [[int(part[i][0]) for i in range(len(part))] for part in parts] == [sorted(order[5:]), sorted(order[:5])]


def test_a_sample_takes_eight_bytes_to_know() -> None:
    """A list of integers takes five times as much, in every rank: 0.4 GB for ten million samples."""
    num = 300_000
    data = as_pipeline_dataset(TensorDataset(torch.zeros(1).expand(num), torch.zeros(1).expand(num)))
    tracemalloc.start()
    train, _ = hold_out(data, 0, None)
    request = next(iter(MinibatchSampler(train, 4, 0, Position())))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 8 * num
    assert all(type(index) is int for index in request.indices)
    assert len(pickle.dumps(train)) < 8 * num * 1.1
