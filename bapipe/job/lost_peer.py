"""Whether an error of gloo or NCCL only shows that another rank has gone."""

import torch.distributed as dist

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
