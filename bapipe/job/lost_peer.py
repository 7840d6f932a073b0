"""Whether an error of gloo or NCCL only shows that another rank has gone, or is too slow, and how that is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from bapipe.errors import BapipeError, RunFailed, one_line

COMMUNICATION = (str(Path(dist.__file__).parent), str(Path(__file__).parent))
"""Folders of code that waits for other ranks. A rank that waits elsewhere, as for data, is one that others wait for."""

_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport", "pair closure")

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


def shows_a_lost_rank(error: BaseException) -> bool:
    """Returns whether an error only shows that another rank has gone, hangs, or cannot be reached."""
    return is_lost_peer(error) or has_waited_too_long(error)


@contextmanager
def waiting_for(who: str) -> Iterator[None]:
    """Notes in errors of gloo or NCCL for whom this rank waited in this context, for `lost_ranks_told`."""
    try:
        yield
    except RuntimeError as error:
        if shows_a_lost_rank(error):
            error.add_note(who)
        raise


@contextmanager
def lost_ranks_told() -> Iterator[None]:
    """Raises RunFailed in place of what gloo or NCCL raises in this context when another rank is lost."""
    try:
        yield
    except BapipeError:
        raise
    except RuntimeError as error:
        if not shows_a_lost_rank(error):
            raise
        who = [*getattr(error, "__notes__", []), "another rank"][0]
        hangs = f"{who} hangs, waits for one that does, or the link to it is cut"
        ended = f"{who} has ended, as where it was killed or its own code failed, or the link to it is cut"
        what = hangs if has_waited_too_long(error) else ended
        raise RunFailed(f"{what}; this rank was waiting for it ({one_line(error)[:200]})") from error


def _file_of(error: BaseException) -> str:
    """Returns the file of the code that raised an error, empty if none did."""
    file, trace = "", error.__traceback__
    while trace is not None:
        file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return file
