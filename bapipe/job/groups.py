"""The process groups of a job: gloo's connections are proven when a group is made, and then nothing else can connect.

gloo takes whoever connects to a port of a group for the peer that it expects, keeps the port open, and aborts the
process if there are too many connections. So ranks first wait for one another: a port is open only while all connect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from bapipe.errors import BapipeError
from bapipe.job.peers import prove_peers
from bapipe.job.sockets import OpenSocket, open_sockets, refuse_newcomers

_PROOF = timedelta(seconds=60)
"""The longest time that the proof of a group may take, whose members are all there."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What proves that a process is a rank of a job; `names` are those of the ranks."""

    names: tuple[str, ...]
    secret: bytes


_JOBS: WeakKeyDictionary[dist.ProcessGroup, _Job] = WeakKeyDictionary()
"""The jobs of the default groups that were made here, as torch too keeps the default group for all of a process."""


def meet(store: dist.Store, index: int, size: int, timeout: timedelta) -> None:
    """Returns when all ranks have called it.

    Raises:
        RuntimeError: that takes longer than the timeout.
    """
    store.set(f"ready{index}", "")
    store.wait([f"ready{rank}" for rank in range(size)], timeout)


def init_proven_group(
    kind: str, store: dist.Store, index: int, names: Sequence[str], secret: bytes, timeout: timedelta
) -> None:
    """Makes the default group of a job, of gloo for `cpu` and of NCCL for `cuda`.

    All of its ranks call it, when they have met.

    Raises:
        BapipeError: something else than a rank is at the end of a connection, or torch has no NCCL.
        RuntimeError: the ranks do not meet.
    """
    if kind == "cuda" and not dist.is_nccl_available():
        raise BapipeError("this torch has no NCCL, by which GPUs exchange tensors: install torch for Linux and CUDA")
    before = open_sockets()
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=index, world_size=len(names), timeout=timeout)
    everyone = dist.group.WORLD
    assert everyone is not None
    _JOBS[everyone] = _Job(tuple(names), secret)
    _prove(everyone, _JOBS[everyone], before, timeout)


def new_proven_group(ranks: Sequence[int] | None, timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """Returns a new group of some ranks, or of all; every rank of the default group calls it.

    It is as proven as the default group: not at all if that was made elsewhere.

    Raises:
        BapipeError: something else than a rank is at the end of a connection.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    job = _JOBS.get(everyone)
    if job is not None:
        dist.barrier()
    before = open_sockets()
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=backend)
    if job is not None and (ranks is None or dist.get_rank() in ranks):
        _prove(group, job, before, timeout)
    return group


def _prove(group: dist.ProcessGroup, job: _Job, before: frozenset[OpenSocket], timeout: timedelta) -> None:
    """Proves a group of gloo, and closes its port; NCCL connects later, when it first needs to."""
    if dist.get_backend(group) == "gloo":
        try:
            prove_peers(group, job.names, job.secret, min(timeout, _PROOF))
        finally:
            refuse_newcomers(before)
