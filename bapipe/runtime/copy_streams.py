"""Copies between host and GPU on CUDA streams of their own, so that they overlap with computation."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bapipe.runtime.pinned_memory import host_tensors


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns a new CUDA stream for copies; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


@contextmanager
def copying_beside(
    device: torch.device, stream: torch.cuda.Stream | None, sources: Iterable[object]
) -> Iterator[list[Tensor]]:
    """In this context copies to the device run on `stream`; work queued on the device afterwards waits for them.

    They overlap with work queued before. But if one of the `sources` is on the device already, they begin after that
    work, which may compute this source. Yields a list, to which the caller adds the copied tensors. On a CPU nothing
    happens.
    """
    copied: list[Tensor] = []
    if stream is None:
        yield copied
        return
    computing = torch.cuda.current_stream(device)
    if any(isinstance(source, Tensor) and source.device == device for source in sources):
        stream.wait_stream(computing)
    with torch.cuda.stream(stream):
        yield copied
    computing.wait_stream(stream)
    for tensor in copied:  # allocated on `stream`, which must not reuse the memory before `computing` is done with it
        tensor.record_stream(computing)


def copied_ahead(tensor: Tensor | None, device: torch.device, stream: torch.cuda.Stream | None) -> Tensor | None:
    """Starts to copy a tensor to the device, overlapping with computation; returns the copy.

    It may be used in or after a later `copying_beside` with the same stream. None, a tensor that is on the device
    already, and any tensor without a `stream` are returned unchanged.
    """
    if tensor is None or stream is None:
        return tensor
    with torch.cuda.stream(stream):
        return tensor.to(device, non_blocking=True)


def wait_for_copies(stream: torch.cuda.Stream | None) -> None:
    """Waits, on the host, until the copies on a stream are complete: their sources may then be overwritten."""
    if stream is not None:
        stream.synchronize()


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Copies of tensors in host memory, complete when the device reaches `done`; complete already if that is None."""

    tensors: dict[str, Tensor]
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Waits, on the host, until the copies are complete."""
        if self.done is not None:
            self.done.synchronize()


def copied_to_host(
    tensors: Mapping[str, Tensor], changed_by_forwards: Collection[str], stream: torch.cuda.Stream | None
) -> HostCopy:
    """Returns host copies of tensors, with the values that they have after all work queued on the device so far.

    On a GPU later work waits until the tensors in `changed_by_forwards` are copied, and overlaps with other copies. The
    caller makes the device wait for `HostCopy.done` before it changes the others.
    """
    if stream is None:
        return HostCopy({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()})
    first, computing = frozenset(changed_by_forwards), torch.cuda.current_stream(stream.device)
    names = sorted(tensors, key=lambda name: name not in first)
    targets = host_tensors(tensors)
    stream.wait_stream(computing)
    with torch.cuda.stream(stream):
        for name in names:
            if name in first:
                start_copy(targets[name], tensors[name])
        computing.wait_event(stream.record_event())
        for name in names:
            if name not in first:
                start_copy(targets[name], tensors[name])
        return HostCopy(targets, stream.record_event())


def start_copy(target: Tensor, source: Tensor) -> None:
    """Starts a copy on the current stream."""
    target.copy_(source.detach(), non_blocking=True)
    if source.is_cuda:  # else the allocator could reuse its memory before it is copied
        source.record_stream(torch.cuda.current_stream(source.device))


def wait_on_device(device: torch.device, event: object | None) -> None:
    """Makes work queued on the device from now on wait for an event, if there is one; the host does not wait."""
    if event is not None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(device).wait_event(event)
