"""Copies between host and GPU beside the GPU's computing, on streams of their own. On a CPU there is nothing to do."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bapipe.runtime.pinned_memory import host_tensors


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns a stream for the copies of one kind; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


@contextmanager
def copying_beside(
    device: torch.device, stream: torch.cuda.Stream | None, sources: Iterable[object]
) -> Iterator[list[Tensor]]:
    """Copies to the device that start in this context run beside what it computes; what it is given later waits.

    If one of the `sources` is on the device already, they begin when it has computed what it was given before, which
    may be that one. Yields a list, to be filled with the tensors that were copied.
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
    for tensor in copied:  # their memory is of the stream of copies, which must not use it again before
        tensor.record_stream(computing)


def copied_ahead(tensor: Tensor | None, device: torch.device, stream: torch.cuda.Stream | None) -> Tensor | None:
    """Returns a copy on the device that is made beside what it computes, for a later `copying_beside` on the stream.

    A tensor that is there already, or None, is returned as it is.
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
    """Copies of tensors on the host, which are complete after an event on the device; None if they are already."""

    tensors: dict[str, Tensor]
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Waits, on the host, until the copies are complete."""
        if self.done is not None:
            self.done.synchronize()


def copied_to_host(
    tensors: Mapping[str, Tensor], changed_by_forwards: Collection[str], stream: torch.cuda.Stream | None
) -> HostCopy:
    """Returns copies of tensors as they are when the device has done all that it has been given.

    On a GPU they are made while it goes on: with all but `changed_by_forwards`, which are copied first, at once. The
    others must not be changed before `HostCopy.done`, for which the device is to wait.
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
    if source.is_cuda:  # else its memory could be used again before it is copied
        source.record_stream(torch.cuda.current_stream(source.device))


def wait_on_device(device: torch.device, event: object | None) -> None:
    """Makes what the device is given from now on wait for an event; the host goes on."""
    if event is not None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(device).wait_event(event)
