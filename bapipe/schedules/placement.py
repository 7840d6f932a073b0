"""Places schedules on the devices of a plan: replicas, permutations of ranks, and named schedules by their stages."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

from bapipe.errors import InvalidSchedule
from bapipe.schedules import ALL, LOOPED, ORDER_OF_RANK, SCHEDULES
from bapipe.schedules.table import Action, Schedule


def merge_stages(table: Schedule, devices: Sequence[tuple[int, ...]], num_ranks: int) -> Schedule:
    """Returns a table of one device per stage with consecutive stages merged, which then have several devices.

    A stage follows the order of the first of its devices, and its devices take its micro-batches round robin. For
    example, 1F1B of 3 stages on `devices` ((0, 1), (2,)) becomes a pipeline of 2 stages, whose first stage keeps as
    many micro-batches in flight as the first of the 3.

    A table without deadlock does not gain one: each device's order, and each path of a micro-batch through the stages,
    is a subsequence of the former one.
    """
    return _merged(table.order.__getitem__, devices, table.num_microbatches, num_ranks)


def merged_named(
    name: str, devices: Sequence[tuple[int, ...]], num_microbatches: int, num_ranks: int, table: Callable[[], Schedule]
) -> Schedule:
    """Returns `merge_stages` of a named schedule's table, which is only made if its ranks are not known one by one."""
    if name not in ORDER_OF_RANK:
        return merge_stages(table(), devices, num_ranks)
    num_merged = sum(map(len, devices))
    return _merged(
        lambda rank: ORDER_OF_RANK[name](rank, num_merged, num_microbatches), devices, num_microbatches, num_ranks
    )


def _merged(
    order_of: Callable[[int], Sequence[Action]],
    devices: Sequence[tuple[int, ...]],
    num_microbatches: int,
    num_ranks: int,
) -> Schedule:
    order: list[list[Action]] = [[] for _ in range(num_ranks)]
    first = 0  # the rank, in the given table, of the stage's first device
    for stage, ranks in enumerate(devices):
        if first == stage and len(ranks) == 1:
            order[ranks[0]].extend(order_of(first))
        else:
            for _, phase, microbatch in order_of(first):
                order[ranks[microbatch % len(ranks)]].append(Action(stage, phase, microbatch))
        first += len(ranks)
    return Schedule(
        devices=tuple(devices),
        num_microbatches=num_microbatches,
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


def place_schedule(name: str, devices: Sequence[tuple[int, ...]], num_microbatches: int, num_ranks: int) -> Schedule:
    """Returns a named schedule on the devices of some stages, as the planner places it.

    A stage on several devices takes the order of as many stages of one device each, merged (`merge_stages`).

    Args:
        devices: the ranks that run each stage. [stages]

    Raises:
        InvalidSchedule: an unknown name, or stages that the schedule cannot have on these devices.
    """
    if name in SCHEDULES:
        ranks = [rank for group in devices for rank in group]
        if len(set(ranks)) < len(ranks):
            raise InvalidSchedule(f"schedule '{name}' has one stage per device; here a device has several stages")
        firsts = accumulate(map(len, devices), initial=0)
        groups = [tuple(range(a, b)) for a, b in pairwise(firsts)]
        whole = partial(SCHEDULES[name], len(ranks), num_microbatches)
        table = merged_named(name, groups, num_microbatches, len(ranks), whole)
        return permute_ranks(table, ranks, num_ranks)
    if name in LOOPED:
        ranks = _ranks_of_positions(name, devices, num_microbatches)
        return permute_ranks(LOOPED[name](len(ranks), num_microbatches), ranks, num_ranks)
    raise InvalidSchedule(f"'{name}' is not a named schedule; choose from {', '.join(ALL)}")


def _ranks_of_positions(name: str, devices: Sequence[tuple[int, ...]], num_microbatches: int) -> list[int]:
    """Returns the rank at each position of a schedule with several stages per device."""
    num_positions = len({rank for group in devices for rank in group})
    positions = LOOPED[name](num_positions, num_microbatches).devices
    rank_at = {position: group[0] for (position,), group in zip(positions, devices, strict=False)}
    if len(positions) != len(devices) or any(
        group != (rank_at[position],) for (position,), group in zip(positions, devices, strict=True)
    ):
        order = ", ".join(str(position) for (position,) in positions)
        raise InvalidSchedule(
            f"schedule '{name}' on {num_positions} devices has {len(positions)} stages, on its devices {order}; "
            f"here are {len(devices)} stages on devices that do not follow that order"
        )
    return [rank_at[position] for position in range(num_positions)]
