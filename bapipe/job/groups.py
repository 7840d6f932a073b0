"""The process groups of a job: gloo's connections are proven when a group is made, and then nothing else can connect.

gloo takes whoever connects to a port of a group for the peer that it expects, keeps the port open, and aborts the
process if there are too many connections. So ranks first wait for one another: a port is open only while all connect.
If a stranger was faster than a rank, all ranks give up that group and make it again at other ports.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from bapipe.errors import BapipeError, first_line
from bapipe.job.peers import prove_peers
from bapipe.job.sockets import open_sockets, refuse_newcomers
from bapipe.torch_private.process_groups import forget_unfinished_groups, set_group_timeout

T = TypeVar("T")

PATIENCE = tuple(timedelta(seconds=seconds) for seconds in (5, 15, 60))
"""How long each attempt to connect and to prove a group may take, whose members are all there."""

_PROVEN = "proven"

_NCCL_DUMP_MS = 250
"""How long NCCL's watchdog leaves torch to write its records of transfers when one has timed out.

It sleeps four times as long before it ends the process; by default, a minute.
"""


@dataclass(frozen=True, slots=True)
class _Job:
    """What proves that a process is a rank of a job; `names` are those of the ranks.

    Attributes:
        store: in which ranks agree whether a group is proven.
        numbers: of its groups.
    """

    names: tuple[str, ...]
    index: int
    secret: bytes
    store: dist.Store
    numbers: Iterator[int] = field(default_factory=count)


_JOBS: WeakKeyDictionary[dist.ProcessGroup, _Job] = WeakKeyDictionary()
"""The jobs of the default groups that were made here, as torch too keeps the default group for all of a process."""

_TIMEOUTS: WeakKeyDictionary[dist.ProcessGroup, timedelta] = WeakKeyDictionary()
"""How long operations of the proven groups may take."""


def use_loopback() -> None:
    """Lets this process connect to others of this machine only: nobody outside can, and its name need not resolve."""
    if sys.platform == "linux":
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


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
        BapipeError: at every attempt something else than a rank was at the end of a connection, or torch has no NCCL.
        RuntimeError: the ranks do not meet.
    """
    if kind == "cuda" and not dist.is_nccl_available():
        raise BapipeError("this torch has no NCCL, by which GPUs exchange tensors: install torch for Linux and CUDA")
    job = _Job(tuple(names), index, secret, store)

    def make(store: dist.Store, limit: timedelta, backend: str = "gloo") -> dist.ProcessGroup:
        forget_unfinished_groups()
        dist.init_process_group(backend, store=store, rank=index, world_size=len(names), timeout=limit)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    if kind == "cuda":
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(_NCCL_DUMP_MS))
        store.set_timeout(timeout)  # NCCL connects later, when it first needs to, and then waits for the others there
    everyone = make(store, timeout, "nccl") if kind == "cuda" else _make_proven(job, make, timeout)
    assert everyone is not None
    _JOBS[everyone] = job


def new_proven_group(ranks: Sequence[int] | None, timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """Returns a new group of some ranks, or of all; every rank of the default group calls it.

    It is as proven as the default group: not at all if that was made elsewhere.

    Raises:
        BapipeError: at every attempt something else than a rank was at the end of a connection.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    job = _JOBS.get(everyone)
    if job is None or (backend or dist.get_backend()) != "gloo":
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=backend)
        return group
    barrier()

    def make(_: dist.Store, limit: timedelta) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(ranks, timeout=limit, backend=backend)
        return made

    return _make_proven(job, make, timeout)


def is_of_a_job() -> bool:
    """Returns whether the default group was made here, for a job, in which ranks tell one another of errors."""
    return dist.group.WORLD in _JOBS


def wait(work: dist.Work | None, group: dist.ProcessGroup | None = None) -> None:
    """Waits for a send or a receive of a group, None for the default one, for as long as its operations may take.

    `work.wait()` does so of groups that were made elsewhere. Of one that is made and proven here, gloo's connections
    keep the patience with which they were made, and only collectives heed a later timeout.

    Raises:
        RuntimeError: that takes longer, or the connection is lost.
    """
    assert work is not None, "this process is in the group"
    proven = group or dist.group.WORLD
    work.wait(_TIMEOUTS.get(proven, timedelta()) if proven is not None else timedelta())  # none: the backend's own


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Waits until all ranks of a group are here, under NCCL on this process's GPU: torch warns of a guess.

    None is the default group.
    """
    dist.barrier(group, device_ids=[torch.cuda.current_device()] if dist.get_backend(group) == "nccl" else None)


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns what the processes of a group pass, in the order of their ranks; all of them call it together.

    None is the default group. Values are pickled.
    """
    of_all = [value] * dist.get_world_size(group)
    dist.all_gather_object(of_all, value, group=group)
    return of_all


def _make_proven(
    job: _Job, make: Callable[[dist.Store, timedelta], dist.ProcessGroup], timeout: timedelta
) -> dist.ProcessGroup:
    """Returns the group of gloo that all ranks of the job make together; if one finds a stranger in it, the next one.

    `make` gets a store of the attempt's own, and how long operations of the group may take.
    """
    number, fault = next(job.numbers), ""
    for attempt, patience in enumerate(PATIENCE):
        store, limit = dist.PrefixStore(f"group{number}.{attempt}", job.store), min(timeout, patience)
        group = _attempt(job, make, store, limit)
        fault = _first_fault(job, store, 3 * limit)
        if group is not None and not fault:
            if isinstance(group, dist.ProcessGroup):
                set_group_timeout(group, timeout)
                _TIMEOUTS[group] = timeout
            return group
        _give_up(group)
    raise BapipeError(fault)


def _attempt(
    job: _Job, make: Callable[[dist.Store, timedelta], dist.ProcessGroup], store: dist.Store, limit: timedelta
) -> dist.ProcessGroup | None:
    """Returns a group that is proven from here, else None; tells all ranks what is wrong, and closes its port."""
    before, group = open_sockets(), None
    try:
        group = make(store, limit)
        if isinstance(group, dist.ProcessGroup):
            prove_peers(group, job.names, job.secret, limit)
    except (BapipeError, RuntimeError) as error:
        said = f"rank {job.index} ({job.names[job.index]}) cannot connect to the others: {first_line(error)}"
        _tell(job, store, str(error) if isinstance(error, BapipeError) else said)
        _give_up(group)  # at once: others may wait for this rank
        return None
    finally:
        refuse_newcomers(before)
    _tell(job, store, "")
    return group


def _tell(job: _Job, store: dist.Store, fault: str) -> None:
    """Tells all ranks of the job what is wrong with an attempt here, if anything, and after how many others."""
    store.set(f"outcome{job.index}", f"{store.add('num_faults', 1)} {fault}" if fault else _PROVEN)


def _first_fault(job: _Job, store: dist.Store, patience: timedelta) -> str:
    """Returns what was wrong first with an attempt, on any rank, empty if nothing: later faults follow from that.

    Raises:
        BapipeError: a rank has told nothing.
    """
    keys = [f"outcome{rank}" for rank in range(len(job.names))]
    try:
        store.wait(keys, patience)
    except RuntimeError:
        silent = [f"rank {rank} ({job.names[rank]})" for rank, key in enumerate(keys) if not store.check([key])]
        raise BapipeError(
            f"rank {job.index} ({job.names[job.index]}) has waited {patience.total_seconds():g} s for "
            f"{', '.join(silent)} to connect to the others: see by which network interface it does so "
            "(GLOO_SOCKET_IFNAME) and what firewalls let through"
        ) from None
    faults = [text.partition(" ") for text in (said.decode() for said in store.multi_get(keys)) if text != _PROVEN]
    return min(faults, key=lambda fault: int(fault[0]), default=("", "", ""))[2]


def _give_up(group: object) -> None:
    """Closes a group, if this rank is in it: torch has a number in the place of a group of others."""
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)
