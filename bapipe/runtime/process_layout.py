"""Which process of the group runs which rank of a schedule, seen from one process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bapipe.schedules.table import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """Which process of the group runs which rank of a schedule; the same on every process but for `rank` and `device`.

    A plan may leave devices without a stage. They get no process, so processes and the schedule's ranks are numbered
    apart.

    Attributes:
        ranks: `ranks[i]` is the schedule's rank that process i of the group runs.
        rank: the schedule's rank that this process runs.
        group: None is the default group.
    """

    schedule: Schedule
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None

    def process_of(self, stage: int, microbatch: int) -> int:
        """Returns the process of the group that runs a micro-batch of a stage."""
        return self.ranks.index(self.schedule.rank_of(stage, microbatch))

    def processes_of(self, ranks: Sequence[int]) -> list[int]:
        """Returns the processes that run some of the schedule's ranks."""
        return [self.ranks.index(rank) for rank in ranks]
