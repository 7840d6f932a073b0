"""Places a schedule of one device per stage on the devices of a plan: replicas, and permutations of ranks."""

from collections.abc import Sequence
from dataclasses import replace

from bapipe.schedules.table import Action, Schedule
from bapipe.simulator.compiled import CompiledSchedule


def merge_stages(table: Schedule, devices: Sequence[tuple[int, ...]], num_ranks: int) -> Schedule:
    """Returns a table of one device per stage with consecutive stages merged, which then have several devices.

    A stage follows the order of the first of its devices, and its devices take its micro-batches round robin. For
    example, 1F1B of 3 stages on `devices` ((0, 1), (2,)) becomes a pipeline of 2 stages, whose first stage keeps as
    many micro-batches in flight as the first of the 3.

    A table without deadlock does not gain one: each device's order, and each path of a micro-batch through the stages,
    is a subsequence of the former one.
    """
    order: list[list[Action]] = [[] for _ in range(num_ranks)]
    first = 0  # the rank, in the given table, of the stage's first device
    for stage, ranks in enumerate(devices):
        for _, phase, microbatch in table.order[first]:
            order[ranks[microbatch % len(ranks)]].append(Action(stage, phase, microbatch))
        first += len(ranks)
    return Schedule(
        devices=tuple(devices),
        num_microbatches=table.num_microbatches,
        order=tuple(tuple(actions) for actions in order),
    )


def distribute_replicas(schedule: Schedule, devices: tuple[tuple[int, ...], ...], num_ranks: int) -> Schedule:
    """Returns a schedule of one device per stage with several devices per stage, which take micro-batches round robin.

    The number of stages stays the same. Each device keeps the order of its stage's actions; a device must not have two
    stages.
    """
    # Round robin over the stage's devices, in the schedule's order of its actions.
    order: list[list[Action]] = [[] for _ in range(num_ranks)]
    for actions in schedule.order:
        for action in actions:
            replicas = devices[action.stage]
            order[replicas[action.microbatch % len(replicas)]].append(action)
    return Schedule(
        devices=devices,
        num_microbatches=schedule.num_microbatches,
        order=tuple(tuple(actions) for actions in order),
    )


def permute_ranks(schedule: Schedule, ranks: Sequence[int], num_ranks: int) -> Schedule:
    """Returns a schedule whose rank i runs as rank `ranks[i]` of `num_ranks`; the other ranks run nothing."""
    order: list[tuple[Action, ...]] = [()] * num_ranks
    for rank, actions in zip(ranks, schedule.order, strict=True):
        order[rank] = actions
    return Schedule(
        devices=tuple(tuple(ranks[rank] for rank in devices) for devices in schedule.devices),
        num_microbatches=schedule.num_microbatches,
        order=tuple(order),
    )


def permute_compiled(compiled: CompiledSchedule, ranks: Sequence[int], num_ranks: int) -> CompiledSchedule:
    """Returns the compiled form of `permute_ranks(schedule, ranks, num_ranks)` without compiling again.

    Actions and their dependencies do not depend on the numbers of ranks; only ranks and the ends of channels do.
    """
    # The lists of actions, needs and products stay: only their ranks are renumbered.
    return replace(
        compiled,
        ranks=tuple([ranks[rank] for rank in compiled.ranks]),
        channels=tuple(
            channel._replace(source=ranks[channel.source], target=ranks[channel.target])
            for channel in compiled.channels
        ),
        num_ranks=num_ranks,
    )
