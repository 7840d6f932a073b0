"""A process group that carries tensors of any device through host memory, by gloo: for several ranks on one GPU.

NCCL before 2.30 refuses two ranks on one GPU, and gloo's send and receive take an address of the GPU for the host's.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "hostmemory"


class _Later(dist.Work):
    """Operations under way, with the host's tensors; what they received goes to the device when it is waited for."""

    def __init__(self, works: Sequence[dist.Work], host: object, finish: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._works, self._host, self._finish, self._is_done = works, host, finish, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._is_done:
            for work in self._works:
                work.wait()
            self._finish()
            self._is_done, self._host = True, None
        return True


class HostMemoryGroup(dist.ProcessGroup):
    """Sends, receives and sums what a pipeline needs; the rest is not there."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        host = [_on_host(tensor) for tensor in tensors]
        return _Later([self._gloo.send(host, dst, tag)], host)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors]
        return _Later([self._gloo.recv(host, src, tag)], host, lambda: _copy(tensors, host))

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        host = [_on_host(tensor) for tensor in tensors]
        return _Later([self._gloo.allreduce(host, opts)], host, lambda: _copy(tensors, host))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        host = [_on_host(tensor) for tensor in tensors]
        return _Later([self._gloo.broadcast(host, opts)], host, lambda: _copy(tensors, host))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        host = [[torch.empty_like(tensor, device="cpu") for tensor in row] for row in outputs]

        def finish() -> None:
            for row, host_row in zip(outputs, host, strict=True):
                _copy(row, host_row)

        return _Later([self._gloo.allgather(host, [_on_host(tensor) for tensor in inputs])], host, finish)

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Later([self._gloo.barrier()], None)


def register() -> None:
    """Makes torch know the backend by its name."""

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> HostMemoryGroup:
        return HostMemoryGroup(store, rank, size, timeout)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu", "cuda"])


def _on_host(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory, when the device has computed it."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _copy(tensors: Sequence[Tensor], host: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, source in zip(tensors, host, strict=True):
            tensor.copy_(source)
