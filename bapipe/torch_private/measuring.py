"""What torch's profiler says of memory, its logs, and a GPU that is kept busy."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import _EventType as EventType

if TYPE_CHECKING:
    pass


def memory_events(profiler: torch.profiler.profile) -> list[tuple[str, int]]:
    """Returns the events of a profile of the CPU in order, each with the bytes it allocates or, if negative, frees.

    Storages allocated before the profile do not count as freed. torch keeps the addresses of all storages that earlier
    profiles saw allocated and none saw freed, and reports what has come to lie there since as freed, with the old size.
    """
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    unvisited = list(profiler.profiler.kineto_results.experimental_event_tree())
    events: list[Any] = []
    while unvisited:
        events.append(unvisited.pop())
        unvisited += events[-1].children
    allocated: set[int] = set()
    changes = []
    for event in sorted(events, key=lambda event: event.start_time_ns):
        num_bytes = 0
        if event.typed[0] == EventType.Allocation:
            address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
            if size > 0:
                allocated.add(address)
                num_bytes = size
            elif address in allocated:
                allocated.remove(address)
                num_bytes = size
        changes.append((event.name, num_bytes))
    return changes


def occupy_gpu(device: torch.device, cycles: int) -> None:
    """Makes a GPU do nothing for a number of its cycles, on its current stream; returns at once."""
    wait: Callable[[int], None] = torch.cuda._sleep  # which torch leaves without types
    with torch.cuda.device(device):
        wait(cycles)


@contextmanager
def without_log(name: str) -> Iterator[None]:
    """Keeps a log from being written to stderr."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
