"""A schedule's table on certain devices."""

from collections.abc import Sequence
from dataclasses import replace

from bapipe.schedules.table import Action, Schedule
from bapipe.simulator.compiled import CompiledSchedule


def merge_stages(table: Schedule, devices: Sequence[tuple[int, ...]], num_ranks: int) -> Schedule:
    """Returns a table of one device a stage as one of fewer stages, each with the next few of the devices.

    A stage follows the order of the first of its devices, and its devices take its micro-batches in turn. What runs
    without deadlock still does: every order and every way from stage to stage is a part of what it was.
    """
    order: list[list[Action]] = [[] for _ in range(num_ranks)]
    first = 0
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
    """Returns a schedule of one device a stage on other devices, several a stage taking micro-batches in turn.

    Each device keeps the order in which its stage's actions come; a device must not have two stages.
    """
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
    """Returns a schedule with its rank i as rank `ranks[i]` of `num_ranks`."""
    order: list[tuple[Action, ...]] = [()] * num_ranks
    for rank, actions in zip(ranks, schedule.order, strict=True):
        order[rank] = actions
    return Schedule(
        devices=tuple(tuple(ranks[own] for own in devices) for devices in schedule.devices),
        num_microbatches=schedule.num_microbatches,
        order=tuple(order),
    )


def permute_compiled(compiled: CompiledSchedule, ranks: Sequence[int], num_ranks: int) -> CompiledSchedule:
    """Returns `permute_ranks(schedule, ranks, num_ranks)` compiled, from the compiled schedule."""
    return replace(
        compiled,
        ranks=tuple([ranks[rank] for rank in compiled.ranks]),
        channels=tuple(
            channel._replace(source=ranks[channel.source], target=ranks[channel.target])
            for channel in compiled.channels
        ),
        num_ranks=num_ranks,
    )
