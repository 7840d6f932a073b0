"""This machine as a cluster, with one measured link."""

import torch
from msgspec import UNSET

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster, Device
from bapipe.hardware import NCCL_BYTES
from bapipe.profiler.links import measure_link
from bapipe.torch_device import describe, framework_bytes
from bapipe.torch_device import num_devices as num_devices_here

KINDS = ("cpu", "cuda")


def cluster(num_devices: int | None, kind: str) -> Cluster:
    """Returns the first devices of a kind on this machine, or all of them for None; a CPU device is one core.

    The memory of a CUDA device is what tensors can have of it: not what the CUDA context, other processes and, if there
    are several devices, NCCL take. CPU devices share the machine's memory evenly. One machine has no link between
    hosts; the cluster says that it is equal to the link within the host. CPU devices sum gradients themselves, so the
    cluster has a link for sums too.

    Raises:
        BapipeError: an unknown kind, or a number of devices that this machine does not have.
        RunFailed: the link cannot be measured.
    """
    count = check_devices(num_devices, kind)
    link, host_sum_link = measure_link("cuda" if kind == "cuda" and num_devices_here(kind) > 1 else "cpu")
    return Cluster(
        devices=tuple(
            Device(
                name=f"{kind}{index}",
                host="host0",
                kind=kind,
                memory_bytes=_memory_bytes(kind, index, count),
                model=describe(torch.device("cuda", index)).name if kind == "cuda" else UNSET,
            )
            for index in range(count)
        ),
        intra_host=link,
        inter_host=link,
        intra_host_sum=host_sum_link if kind == "cpu" else UNSET,
    )


def check_devices(num_devices: int | None, kind: str) -> int:
    """Returns the number of devices of a kind, all that this machine has for None.

    Raises:
        BapipeError: an unknown kind, or a number of devices that this machine does not have.
    """
    if kind not in KINDS:
        raise BapipeError(f"unknown device kind '{kind}'; want one of {', '.join(KINDS)}")
    present = num_devices_here(kind)
    if present == 0:
        raise BapipeError(f"this machine has no device of kind '{kind}': choose `device` cpu")
    count = present if num_devices is None else num_devices
    if count < 1:
        raise BapipeError(f"a cluster cannot have {count} devices: want 1 to {present}")
    if count > present:
        raise BapipeError(
            f"{count} devices of kind '{kind}' are more than this machine has: choose {present} or fewer, "
            "or write a cluster file for the machines that have more"
        )
    return count


def _memory_bytes(kind: str, index: int, count: int) -> int:
    if kind == "cuda":
        device = torch.device("cuda", index)
        for_messages = NCCL_BYTES if count > 1 else 0
        return max(describe(device).memory_bytes - framework_bytes(device) - for_messages, 0)
    return describe(torch.device("cpu")).memory_bytes // count
