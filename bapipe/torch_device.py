"""This machine as a place to compute: its devices, their names and memory, and settings that make times repeatable."""

import ctypes
import platform
import sys

import torch

from bapipe.formats.profile import DeviceKind
from bapipe.hardware import cpu_name, memory_bytes, num_cores

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's mallopt


def prepare_cpu(num_threads: int = 1) -> None:
    """Fixes the number of compute threads of this process and makes freed memory cheap to take again.

    glibc gives large blocks back to the kernel when they are freed, so every weight gradient of 100 MB costs 25,000
    page faults a micro-batch; a process that trains keeps its memory.
    """
    torch.set_num_threads(num_threads)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never


def num_devices(kind: str) -> int:
    """Returns how many devices of a kind this machine has: CUDA devices, or the cores this process may use."""
    if kind == "cuda":
        return torch.cuda.device_count()
    return num_cores()


def describe(device: torch.device) -> DeviceKind:
    """Returns the kind, name and memory of a device; a CPU's memory is the machine's."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceKind(kind="cuda", name=properties.name, memory_bytes=properties.total_memory)
    return DeviceKind(kind="cpu", name=cpu_name(), memory_bytes=memory_bytes())


def framework_bytes(device: torch.device) -> int:
    """Returns what torch and its libraries have taken of a CUDA device besides tensors, or others have; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def environment() -> dict[str, object]:
    """Returns the software that times depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.machine()}",
    }
