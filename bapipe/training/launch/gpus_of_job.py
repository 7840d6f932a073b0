"""Which GPU of which machine each rank of a job has, compared with the hosts and models in the plan's cluster.

torchrun and Slurm choose the machine of a rank, and number ranks host by host; the plan chooses the GPU of the host.
"""

import socket
from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec
import torch

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Device
from bapipe.job.store import JobStore
from bapipe.torch_device import describe, gpu_uuid

HOW_TO_START = (
    "ranks are numbered host by host, so list the cluster's devices in that order, and start on each host as many "
    "processes as the plan has devices there, the hosts in the plan's order (node-rank of torchrun)"
)


class RankGpu(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU of a rank.

    Attributes:
        machine: the name of the machine that the rank runs on.
        model: the GPU's model, as the driver names it.
        uuid: the GPU's unique name; None if torch does not know it.
    """

    machine: str
    model: str
    uuid: str | None


def gpus_of_all(store: JobStore, index: int, size: int, device: torch.device) -> list[RankGpu]:
    """Returns the GPUs of all ranks of a job, which call it together, each with its own device."""
    own = RankGpu(machine=socket.gethostname(), model=describe(device).name, uuid=gpu_uuid(device))
    store.set(f"gpu{index}", msgspec.json.encode(own))
    return [msgspec.json.decode(gpu, type=RankGpu) for gpu in store.multi_get([f"gpu{rank}" for rank in range(size)])]


def check_one_rank_per_gpu(devices: Sequence[Device], found: Sequence[RankGpu]) -> None:
    """Raises BapipeError if two ranks have the same GPU; `devices` are theirs in the plan's cluster."""
    rank_of: dict[str, int] = {}
    for rank, gpu in enumerate(found):
        first = rank if gpu.uuid is None else rank_of.setdefault(gpu.uuid, rank)
        if first != rank:
            raise BapipeError(
                f"{_title(first, devices)} and {_title(rank, devices)} have the same GPU of machine '{gpu.machine}': "
                f"{HOW_TO_START}"
            )


def unlike_the_plan(devices: Sequence[Device], found: Sequence[RankGpu]) -> Iterator[str]:
    """Yields how the job's machines and GPUs differ from the plan's cluster, at most one line for each of the two."""
    for a, b in combinations(range(len(devices)), 2):
        machines = dict.fromkeys((found[a].machine, found[b].machine))
        if (devices[a].host == devices[b].host) != (len(machines) == 1):
            yield (
                f"{_title(a, devices)} and {_title(b, devices)} run on {' and '.join(machines)}, so their transfers do "
                f"not take as long as predicted: {HOW_TO_START}"
            )
            break
    for rank, (device, gpu) in enumerate(zip(devices, found, strict=True)):
        if device.model is not msgspec.UNSET and device.model != gpu.model:
            yield (
                f"{_title(rank, devices)} is planned for '{device.model}' and has '{gpu.model}', so its times and "
                "memory are not those predicted: start the hosts in the plan's order, or profile and plan for these"
            )
            break


def _title(rank: int, devices: Sequence[Device]) -> str:
    return f"rank {rank} ({devices[rank].name} of the plan's host '{devices[rank].host}')"
