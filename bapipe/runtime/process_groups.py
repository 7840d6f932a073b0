"""The process groups of a pipeline: those that carry tensors between stages, and those in which gradients are summed.

Gradients are summed over the replicas of a stage, and over the stages that use a tied weight. Every process makes all
groups in the same order, also those that it is not in: `new_group` is collective.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from bapipe.equivalence.outcome import Loss
from bapipe.errors import BapipeError
from bapipe.job.groups import barrier, new_proven_group
from bapipe.runtime.call_order import CallOrder
from bapipe.runtime.clock import Clock
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.runtime.replicas import Replicas, broadcast
from bapipe.runtime.tied_weights import TiedGradients
from bapipe.runtime.transfers import Channels
from bapipe.torch_private.process_groups import abort_group, default_group_timeout
from bapipe.tracing.stages import Split, trained_layers


class OwnGroups:
    """The process groups that are made for one pipeline, and end with it; all processes make them together.

    A group keeps its connections and threads for as long as anything refers to it.
    """

    def __init__(self, layout: ProcessLayout) -> None:
        assert dist.group.WORLD is not None
        self._layout, self._default = layout, ref(dist.group.WORLD)
        self._made: list[object] = []  # torch has a number in the place of a group that this process is not in
        self._users = ExitStack()

    def of_ranks(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Returns a new group of some of the schedule's ranks, with the timeout of the default group."""
        members = self._layout.processes_of(ranks)
        group = new_proven_group(members, default_group_timeout(self._layout.device))
        self._made.append(group)
        return group

    def of_all(self) -> dist.ProcessGroup:
        """Returns a new group of the processes of the layout's group."""
        given, timeout = self._layout.group, default_group_timeout(self._layout.device)
        group: dist.ProcessGroup
        if given is None:
            group = new_proven_group(None, timeout)
        else:
            group = dist.new_group(  # processes that are not in it do not call this
                dist.get_process_group_ranks(given),
                timeout=timeout,
                backend=dist.get_backend(given),
                use_local_synchronization=True,
            )
        self._made.append(group)
        return group

    @property
    def made(self) -> list[dist.ProcessGroup]:
        """The groups that this process is in."""
        return [group for group in self._made if isinstance(group, dist.ProcessGroup)]

    def before_end(self, forget: Callable[[], None]) -> None:
        """Adds what to call before these groups end, to remove what else would refer to them."""
        self._users.callback(forget)

    def destroy(self) -> None:
        """Destroys these groups once all processes are here, so that none still waits for what another one sends."""
        taken = self._taken()
        if taken:  # also where this process is in none of them: all wait here for each other
            barrier(self._layout.group)
        for group in _joined(taken):
            dist.destroy_process_group(group)

    @contextmanager
    def aborted_on_error(self) -> Iterator[None]:
        """Ends these groups if this context ends with an error, without waiting: other processes may never come."""
        try:
            yield
        except BaseException:
            for group in _joined(self._taken()):
                abort_group(group)
            raise

    def _taken(self) -> list[object]:
        """Returns the groups, which nothing of this pipeline refers to any more.

        None are left if whoever made the default group has destroyed it, and so all groups.
        """
        self._users.close()
        made, self._made = self._made, []
        return [] if dist.group.WORLD is None or dist.group.WORLD is not self._default() else made


def _joined(made: Sequence[object]) -> list[dist.ProcessGroup]:
    """Returns the groups that this process is in."""
    return [group for group in made if isinstance(group, dist.ProcessGroup)]


def connect_tied_weights(layout: ProcessLayout, own_groups: OwnGroups, parts: Split) -> TiedGradients:
    """Returns the trained parameters that this rank's stages share with those of other ranks.

    All shared parameters, frozen ones too, get the values of the first rank that has them.

    Raises:
        BapipeError: a trained parameter is shared, and the layout's group is not the default one.
    """
    schedule = layout.schedule
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # by the ranks in them
    users_of = []
    for tied in parts.tied:
        users = tuple(sorted({rank for s in tied.stages for rank in schedule.devices[s]}))
        if len(users) == 1:
            continue
        if not tied.parameter.requires_grad:  # no gradients to sum, so it has no group of its own
            value = tied.parameter.detach()
            value = value if layout.rank in users else torch.empty_like(value, device=layout.device)
            broadcast(value, layout.group, layout.ranks.index(users[0]))
            continue
        if layout.group is not None:
            raise BapipeError(
                f"'{tied.name}' is in several stages, which need the default process group: leave out `group`"
            )
        if users not in groups:
            groups[users] = own_groups.of_ranks(users)
        if layout.rank in users:
            broadcast(tied.parameter.detach(), groups[users])
            users_of.append((tied.parameter, groups[users]))
    return TiedGradients(users_of)


def connect_replicas(
    layout: ProcessLayout,
    own_groups: OwnGroups,
    parts: Split,
    modules: Mapping[int, nn.Module],
    tied: Sequence[nn.Parameter],
    loss: Loss,
    clock: Clock,
) -> dict[int, Replicas]:
    """Returns a `Replicas` for each stage of this rank that runs on several ranks, by stage.

    `modules` are this rank's stages; the gradients of `tied` parameters are left out, `TiedGradients` sums them.

    Raises:
        BapipeError: a stage has replicas, and the layout's group is not the default one.
    """
    schedule = layout.schedule
    replicas = {}
    for s, devices in enumerate(schedule.devices):
        if len(devices) == 1:
            continue
        if layout.group is not None:
            raise BapipeError(f"stage {s} has replicas, which need the default process group: leave out `group`")
        group = own_groups.of_ranks(devices)
        if layout.rank in devices:
            num_own = sum(schedule.rank_of(s, m) == layout.rank for m in range(schedule.num_microbatches))
            layers = trained_layers(parts, s, without=tied)
            own_loss = loss if s == schedule.num_stages - 1 else None
            share = num_own / schedule.num_microbatches
            replicas[s] = Replicas(s, modules[s], layers, group, share, clock, own_loss)
            own_groups.before_end(replicas[s].gradients.remove_hooks)
    return replicas


def connect_channels(layout: ProcessLayout, own_groups: OwnGroups, calls: CallOrder) -> Channels:
    """Returns the groups that carry tensors between stages; every process of the layout's group calls it together.

    With gloo it is that group itself. NCCL runs all transfers of a group between two processes in one queue, so each
    direction has a group of its own. NCCL also connects two processes at their first transfer, for which both must
    wait. So all pairs of processes that will exchange tensors exchange one here, in the same order everywhere.
    """
    own, pairs = dist.get_rank(layout.group), _neighbours(layout)
    if layout.uses_gloo or not pairs:
        return Channels(process=own, ascending=layout.group, descending=layout.group, calls=calls)
    channels = Channels(process=own, ascending=own_groups.of_all(), descending=own_groups.of_all(), calls=calls)
    sent, received = torch.zeros(1, device=layout.device), torch.zeros(1, device=layout.device)
    for low, high in pairs:
        if own == low:  # the ascending group first, on both sides
            channels.wait(channels.send(sent, high), high)
            channels.wait(channels.receive(received, high), high)
        elif own == high:
            channels.wait(channels.receive(received, low), low)
            channels.wait(channels.send(sent, low), low)
    return channels


def _neighbours(layout: ProcessLayout) -> list[tuple[int, int]]:
    """Returns the pairs of processes that exchange tensors, ascending."""
    schedule, found = layout.schedule, set[tuple[int, int]]()
    for microbatch in range(schedule.num_microbatches):
        processes = [layout.process_of(s, microbatch) for s in range(schedule.num_stages)]
        found |= {(min(pair), max(pair)) for pair in pairwise(processes) if pair[0] != pair[1]}
    return sorted(found)
