"""What torch's profiler says of memory, its logs, and a GPU that is kept busy."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_current_level
from torch._C._profiler import _EventType as EventType
from torch.autograd.graph import saved_tensors_hooks

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


@contextmanager
def saved_tensors_watched(watch: Callable[[Tensor], None]) -> Iterator[None]:
    """In this context `watch` is called with each tensor that autograd saves, also within transforms of `torch.func`.

    What it is called with has the memory of that tensor. Transforms refuse hooks on saved tensors, as these might
    compute something in a transform; this one does not.
    """

    def pack(tensor: Tensor) -> Tensor:
        plain = tensor
        while is_functorch_wrapped_tensor(plain):
            plain = get_unwrapped(plain)
        watch(plain)
        if maybe_current_level() is not None:
            return tensor  # its graph may be that of another level
        # Keeps the storage alive, so that no other one gets its address; not the tensor: an operator that saves its own
        # output would keep its graph, where Python's garbage collector does not see it.
        return tensor.detach()

    with (
        patch.object(torch.autograd.graph, "disable_saved_tensors_hooks", lambda message: nullcontext()),
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        yield
