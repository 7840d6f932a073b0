"""How many processes load data for a rank."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

from bapipe.hardware import num_cores
from bapipe.processes import can_be_pickled
from bapipe.torchrun import current_job
from bapipe.training.data.loader import PREFETCH
from bapipe.zoo.data.dataset import PipelineDataset

_MAX_WORKERS, _MAX_WORKERS_OF_GPU = 4, 8
_SHARED_MEMORY = Path("/dev/shm")


def num_data_workers(
    chosen: int | None,
    dataset: PipelineDataset[Any],
    *,
    on_gpu: bool,
    num_ranks: int,
    num_threads: int,
    batch_bytes: int,
) -> int:
    """Returns `chosen`, or by default a number of workers that this machine has cores and shared memory for.

    The default is 0 for data that is fast to load, and for data that cannot be pickled, such as of a class defined in a
    notebook. It is 0 under torchrun, too: workers import the main program again, and a script for torchrun need not be
    safe to import.

    Args:
        on_gpu: whether the ranks train on GPUs.
        num_ranks: ranks on this machine.
        num_threads: compute threads of each rank.
        batch_bytes: size of a mini-batch.
    """
    if chosen is not None:
        return chosen
    is_slow = dataset.is_slow_for_gpu if on_gpu else dataset.is_slow_to_load
    if not is_slow or current_job() is not None:
        return 0
    spare_cores = num_cores() - num_ranks * num_threads
    by_memory = _free_shared_memory() // num_ranks // max(1, batch_bytes) // (PREFETCH + 1)
    num = int(max(0, min(_MAX_WORKERS_OF_GPU if on_gpu else _MAX_WORKERS, spare_cores // num_ranks, by_memory)))
    return num if num and can_be_pickled(dataset) else 0


def _free_shared_memory() -> float:
    """Returns the free bytes of shared memory for batches; containers often have little, or let nobody write to it."""
    if not _SHARED_MEMORY.is_dir():
        return math.inf
    return shutil.disk_usage(_SHARED_MEMORY).free if os.access(_SHARED_MEMORY, os.W_OK) else 0
