"""The groups of processes in which a plan's gradients are summed; every process makes them together."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from bapipe.errors import BapipeError
from bapipe.runtime.clock import Clock
from bapipe.runtime.executor import subgroup
from bapipe.runtime.replicas import Replicas
from bapipe.runtime.split import Split, trained_layers
from bapipe.runtime.tied_weights import TiedGradients
from bapipe.schedules.table import Schedule


def connect_tied_weights(
    parts: Split, schedule: Schedule, ranks: Sequence[int], rank: int, device: torch.device, group: object | None
) -> TiedGradients:
    """Returns the parameters that this rank's stages share with those of other ranks.

    `ranks[i]` is the schedule's rank that process i plays, `rank` this one's.

    Raises:
        BapipeError: there are some, and a group other than the default one was given.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    summed = []
    for one in parts.shared:
        users = tuple(sorted({user for s in one.stages for user in schedule.devices[s]}))
        if len(users) == 1 or not one.parameter.requires_grad:
            continue
        if group is not None:
            raise BapipeError(
                f"'{one.name}' is in several stages, which need the default process group: leave out `group`"
            )
        if users not in groups:
            groups[users] = subgroup([ranks.index(user) for user in users], device)
        if rank in users:
            summed.append((one.parameter, groups[users]))
    return TiedGradients(summed)


def connect_replicas(
    parts: Split,
    schedule: Schedule,
    ranks: Sequence[int],
    rank: int,
    modules: Mapping[int, nn.Module],
    apart: Sequence[nn.Parameter],
    clock: Clock,
    device: torch.device,
    group: object | None,
) -> dict[int, Replicas]:
    """Returns this rank's place in each of its stages that has replicas; gradients of `apart` are summed elsewhere.

    Raises:
        BapipeError: there are some, and a group other than the default one was given.
    """
    replicas = {}
    for s, own in enumerate(schedule.devices):
        if len(own) == 1:
            continue
        if group is not None:
            raise BapipeError(f"stage {s} has replicas, which need the default process group: leave out `group`")
        members = subgroup([ranks.index(one) for one in own], device)
        if rank in own:
            num = sum(schedule.rank_of(s, m) == rank for m in range(schedule.num_microbatches))
            layers = trained_layers(parts, s, without=apart)
            replicas[s] = Replicas(modules[s], layers, members, num / schedule.num_microbatches, clock)
    return replicas
