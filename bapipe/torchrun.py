"""The job of torchrun, or of Slurm, that this process is a rank of."""

import os


class Job:
    """A job, seen from one of its processes: which rank that is, and how many there are."""

    # Not a dataclass: importing those takes longer than all else before signals are handled.
    __slots__ = "rank", "size"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def current_job() -> Job | None:
    """Returns the job that this process is a rank of, None if it is in none.

    A job sets RANK and WORLD_SIZE. One of them alone says nothing: batch systems and shells use the name, too.
    """
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return Job(int(rank), int(size)) if rank.isdecimal() and size.isdecimal() else None


def is_first_rank() -> bool:
    """Returns whether this process is the one of its job that reports: any process that is not in a job is."""
    job = current_job()
    return job is None or job.rank == 0
