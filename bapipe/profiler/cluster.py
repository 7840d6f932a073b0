"""This machine as a cluster, with one measured link."""

import torch
from msgspec import UNSET

from bapipe.device_types import DEVICE_TYPES
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster, Device
from bapipe.hardware import bytes_for_tensors
from bapipe.profiler.links import measure_link
from bapipe.torch_device import CPU, describe, framework_bytes, local_device
from bapipe.torch_device import num_devices as num_devices_here


def cluster(num_devices: int | None, kind: str) -> Cluster:
    """Returns the first devices of a kind on this machine, or all of them for None; a CPU device is one core.

    One machine has no link between hosts; the cluster says that it is equal to the link within the host. CPU devices
    sum gradients themselves, so the cluster has a link for sums too.

    Raises:
        BapipeError: an unknown kind, or a number of devices that this machine does not have.
        RunFailed: the link cannot be measured.
    """
    count = check_devices(num_devices, kind)
    link, host_sum_link = measure_link("cuda" if kind == "cuda" and num_devices_here(kind) > 1 else "cpu")
    return Cluster(
        devices=tuple(
            device_here(kind, index, name=f"{kind}{index}", host="host0", num_on_host=count, num_devices=count)
            for index in range(count)
        ),
        intra_host=link,
        inter_host=link,
        intra_host_sum=host_sum_link if kind == "cpu" else UNSET,
    )


def check_devices(num_devices: int | None, kind: str) -> int:
    """Returns the number of devices of a kind, all that this machine has for None.

    Raises:
        BapipeError: an unknown kind, a number of devices that this machine does not have, or as `local_device`.
    """
    if kind not in DEVICE_TYPES:
        raise BapipeError(f"unknown device kind '{kind}'; want one of {', '.join(DEVICE_TYPES)}")
    local_device(kind)
    present = num_devices_here(kind)
    count = present if num_devices is None else num_devices
    if count < 1:
        raise BapipeError(f"a cluster cannot have {count} devices: want 1 to {present}")
    if count > present:
        raise BapipeError(
            f"{count} devices of kind '{kind}' are more than this machine has: choose {present} or fewer, "
            "or write a cluster file for the machines that have more"
        )
    return count


def device_here(kind: str, index: int, *, name: str, host: str, num_on_host: int, num_devices: int) -> Device:
    """Returns a device of this machine; `num_devices` in all are used, `num_on_host` of them here.

    The memory of a CUDA device is what tensors can have of it: not what the CUDA context, other processes and, if there
    are several devices, NCCL take. CPU devices share the machine's memory evenly.
    """
    device = torch.device(kind, index) if kind == "cuda" else CPU
    found = describe(device)
    if kind != "cuda":
        return Device(name=name, host=host, kind=kind, memory_bytes=found.memory_bytes // num_on_host)
    memory_bytes = bytes_for_tensors(found.memory_bytes, framework_bytes(device), num_devices)
    return Device(name=name, host=host, kind=kind, memory_bytes=memory_bytes, model=found.name)
