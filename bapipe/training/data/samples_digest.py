"""A digest of samples, by which ranks, and runs that resume, check that they have the same data."""

import hashlib
from typing import Any

import torch

from bapipe.module_state.python_random import all_generators_restored, seed_cpu_generators
from bapipe.runtime.plan_digest import NUM_DIGITS
from bapipe.runtime.tensor_changes import content
from bapipe.torch_device import CPU
from bapipe.zoo.data.dataset import PipelineDataset, item_parts


def samples_digest(data: PipelineDataset[Any]) -> str | None:
    """Returns a digest of the first and last sample; None if they are random, or cannot be made tensors."""
    try:
        first, second = (_digest(data, seed) for seed in (0, 1))
    except Exception:  # whatever the data set's own code raises; training will report it
        return None
    return first if first == second else None


def _digest(data: PipelineDataset[Any], seed: int) -> str:
    digest = hashlib.sha256()
    with all_generators_restored():
        seed_cpu_generators(seed)
        for index in (0, len(data) - 1):
            for part in item_parts(data[index]):
                tensor = torch.as_tensor(part, device=CPU)
                digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                digest.update(content(tensor))
    return digest.hexdigest()[:NUM_DIGITS]
