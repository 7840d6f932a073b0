"""Whether an error of gloo or NCCL only shows that another rank has gone, or is too slow."""

from pathlib import Path

import torch.distributed as dist

COMMUNICATION = (str(Path(dist.__file__).parent), str(Path(__file__).parent))
"""Folders of code that waits for other ranks. A rank that waits elsewhere, as for data, is one that others wait for."""

_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")

_OWN_FAULT = (
    *("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError"),
    *("shared memory segment", "posix_fallocate"),  # what a small /dev/shm fails at
)
"""What NCCL says where a rank itself is at fault. It tells the death of another one as any of its other errors."""


def is_lost_peer(error: BaseException) -> bool:
    """Returns whether an error only shows that another rank has gone."""
    if isinstance(error, dist.DistBackendError):
        return not any(sign in str(error) for sign in _OWN_FAULT)
    lost = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    return lost or any(sign in str(error) for sign in _LOST_PEER)


def has_waited_too_long(error: BaseException) -> bool:
    """Returns whether an error says that communication has timed out, not other code, such as a loader of data."""
    if not isinstance(error, RuntimeError) or not any(sign in str(error).lower() for sign in ("timed out", "timeout")):
        return False
    return isinstance(error, dist.DistError) or _file_of(error).startswith(COMMUNICATION)


def _file_of(error: BaseException) -> str:
    """Returns the file of the code that raised an error, empty if none did."""
    file, trace = "", error.__traceback__
    while trace is not None:
        file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return file
