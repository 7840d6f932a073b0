"""Process groups: their time limits, and their backends."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    pass


def default_group_timeout(device: torch.device) -> Any:
    """Returns how long an operation of the default group may take on a device; `new_group` does not take it over."""
    group = dist.distributed_c10d._get_default_group()
    # Neither a group that is written in Python says it, nor torch's for tests.
    options = _backend(group, device).options if type(group) is dist.ProcessGroup else None
    return dist.distributed_c10d.default_pg_timeout if options is None else options._timeout


def default_store() -> dist.Store:
    """Returns the store through which the processes of the default group have found each other."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def ends_with_rank_0(store: dist.Store) -> bool:
    """Returns whether a store is served by the process of rank 0, as torch does unless torchrun's agent serves it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def forget_unfinished_groups() -> None:
    """Numbers process groups from 0 again, as ranks must agree: torch counts a default group that failed to connect."""
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Sets how long collectives of a group of gloo may take from now on."""
    _backend(group, torch.device("cpu"))._set_default_timeout(timeout)


def abort_group(group: dist.ProcessGroup) -> None:
    """Ends a group without waiting for its other processes, for which `destroy_process_group` may wait under NCCL."""
    vars(dist.distributed_c10d)["_abort_process_group"](group)


def backend_name(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the name of a group's backend for the tensors of a device, such as gloo or nccl; None: default group."""
    group = group or dist.distributed_c10d._get_default_group()
    if type(group) is not dist.ProcessGroup:  # one that is written in Python is its own backend
        return str(dist.get_backend(group))
    name: str = _backend(group, device).name()
    return name


def processes_of_collective(operator: Any, args: Sequence[Any]) -> list[int] | None:
    """Returns the global ranks of the processes that an operator communicates with; None if it is no such operator."""
    if getattr(operator, "namespace", "") not in ("c10d", "_c10d_functional"):
        return None
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    for one in args:
        try:  # a group, or, of functional collectives, its name
            is_name = isinstance(one, str) and one not in ("sum", "avg", "product", "min", "max")
            group = resolve(one) if is_name else dist.ProcessGroup.unbox(one)
        except (RuntimeError, TypeError, ValueError):  # another argument
            continue
        return list(dist.get_process_group_ranks(group))
    return None


def name_of_collective(operator: Any) -> str:
    """Returns the name of an operator that communicates, such as allreduce."""
    name: str = operator.overloadpacket.__name__
    return name.strip("_")


def num_collectives(group: dist.ProcessGroup | None) -> int:
    """Returns how many collectives this process has called in a group; None is the default group."""
    counting: Any = group or dist.distributed_c10d._get_default_group()
    try:
        return int(counting._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return 0


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns what runs a group's operations on a device: TORCH_DISTRIBUTED_DEBUG=DETAIL puts checks around it."""
    backend: Any = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)
