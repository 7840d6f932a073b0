"""The peak memory that training adds to a process."""

import ctypes
import gc
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from bapipe.errors import BapipeError

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def check_free_memory(device: torch.device, name: str, predicted_bytes: int) -> None:
    """Raises BapipeError if a CUDA device, `name` in the plan, has less free memory than the plan needs on it."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if free < predicted_bytes:
        raise BapipeError(
            f"'{name}' has {free} of {total} bytes free, and the plan is predicted to take {predicted_bytes}: another "
            f"process uses this GPU; end it, or plan with a `memory_limit_bytes` below {free}"
        )


class PeakMemory:
    """Measures the peak bytes used on a device since this object was made, and by `tensors` that are there already.

    On CUDA it is the peak of torch's allocator, on Linux that of the process's resident memory, each less what was used
    at the start. On other systems, and where /proc cannot be written to, it is not known.
    """

    def __init__(self, device: torch.device, tensors: Iterable[Tensor] = ()) -> None:
        self._device = device
        self._held_bytes = sum(tensor.nbytes for tensor in tensors if tensor.device == device)
        self._base_bytes: int | None = None  # if it is known
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._base_bytes = torch.cuda.memory_allocated(device)
        elif sys.platform == "linux":
            libc = ctypes.CDLL(None)
            # Freed blocks that glibc keeps would count as resident now, and their reuse would not count later.
            if hasattr(libc, "malloc_trim"):
                libc.malloc_trim(0)
            with suppress(OSError):
                _CLEAR_REFS.write_text("5")  # resets VmHWM, see proc(5)
                self._base_bytes = _status_bytes("VmRSS")

    def peak_bytes(self) -> int | None:
        """Returns the peak so far, or None if the system does not report it."""
        if self._base_bytes is None:
            return None
        is_cuda = self._device.type == "cuda"
        peak_bytes = torch.cuda.max_memory_allocated(self._device) if is_cuda else _status_bytes("VmHWM")
        return max(0, peak_bytes - self._base_bytes + self._held_bytes)


def _status_bytes(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert match, key
    return int(match[1]) * 1024
