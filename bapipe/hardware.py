"""The hardware of this machine, determined without torch: cores, memory, name of the processor."""

import os
import platform

NCCL_BYTES = 2**30
"""What NCCL's communicators and cuBLAS's workspaces may take of a GPU's memory; torch's allocator does not see it."""


def bytes_for_tensors(memory_bytes: int, framework_bytes: int, num_devices: int) -> int:
    """Returns what tensors can have of a GPU's memory: not what its framework takes and, of several GPUs, NCCL."""
    return max(memory_bytes - framework_bytes - (NCCL_BYTES if num_devices > 1 else 0), 0)


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Returns the physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_name() -> str:
    """Returns the name of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
