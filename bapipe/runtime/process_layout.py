"""Which process of the group runs which rank of a schedule, seen from one process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.job.groups import gathered
from bapipe.runtime.plan_digest import plan_digest
from bapipe.runtime.runnable import check_runnable
from bapipe.schedules.table import Schedule
from bapipe.torch_private.process_groups import backend_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """Which process of the group runs which rank of a schedule; the same on every process but for `rank` and `device`.

    A plan may leave devices without a stage. They get no process, so the numbers of processes differ from the
    schedule's ranks.

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

    @property
    def uses_gloo(self) -> bool:
        """Whether gloo sends tensors between ranks; the order of transfers depends on that, see `lower_for`."""
        return backend_name(self.group, self.device) == "gloo"

    def processes_of(self, ranks: Sequence[int]) -> list[int]:
        """Returns the processes of the group that run the given ranks of the schedule, in their order."""
        return [self.ranks.index(rank) for rank in ranks]


def layout_of(plan: Plan, device: torch.device, group: dist.ProcessGroup | None) -> ProcessLayout:
    """Returns which process of the group runs which rank of a plan; all processes call it together.

    Raises:
        BapipeError: there is no process group, the plan cannot run, or not with this number of processes, or processes
            have different plans.
    """
    if group is None and not dist.is_initialized():
        raise BapipeError(
            "there is no process group: call torch.distributed.init_process_group in every process before, or train "
            "with bapipe.run, which starts the processes"
        )
    ranks, num_processes = check_runnable(plan), dist.get_world_size(group)
    if num_processes != len(ranks):
        raise BapipeError(
            f"the plan runs on {len(ranks)} devices but this group has {num_processes} processes: start {len(ranks)}, "
            f"or plan for {num_processes} devices"
        )
    digests = gathered(plan_digest(plan), group)
    other = next((process for process, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise BapipeError(
            f"processes 0 and {other} of the group have different plans: give all of them the same plan, such as one "
            "file"
        )
    rank = ranks[dist.get_rank(group)]
    return ProcessLayout(schedule=plan.table, ranks=ranks, rank=rank, device=device, group=group)
