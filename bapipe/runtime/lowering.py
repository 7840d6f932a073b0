"""Lowering of a plan: whether torch can run it, and its schedule with the sends and receives between the actions.

They are written as torch writes them: `0SEND_F1`, `1RECV_F1`. torch lowers too (`_prepare_schedule_with_comms`), but
knows one rank per stage; here a stage may have replicas, which take the micro-batches in turn.
"""

from collections.abc import Sequence

from bapipe.errors import BapipeError, InvalidSchedule
from bapipe.formats.plan import Plan
from bapipe.schedules.table import Action, Phase, Schedule, check, is_ready


def check_runnable(plan: Plan) -> tuple[int, ...]:
    """Returns the ranks of the plan that have a stage.

    Raises:
        InvalidSchedule: the plan's order is incomplete, misplaced or deadlocks.
        BapipeError: a device overlaps forward and backward, neighbouring stages share only some of their devices, or a
            stage has devices without micro-batches.
    """
    for device in plan.cluster.devices:
        if device.side_by_side:
            raise BapipeError(
                f"device '{device.name}' runs forward and backward side by side, which torch cannot: plan with a "
                "schedule other than fbp-as, or leave side_by_side out of the cluster"
            )
    for s, stage in enumerate(plan.stages):
        if len(stage.devices) > plan.num_microbatches:
            raise BapipeError(
                f"stage {s} has {len(stage.devices)} devices for {plan.num_microbatches} micro-batches: plan with more "
                "micro-batches, or fewer devices"
            )
    schedule = plan.table
    check(schedule)
    lower_schedule(schedule)
    return ranks_with_stage(schedule)


def ranks_with_stage(schedule: Schedule) -> tuple[int, ...]:
    """Returns the ranks of a schedule that have a stage, ascending: process i of a group runs the i-th of them."""
    return tuple(sorted({rank for ranks in schedule.devices for rank in ranks}))


def lower_schedule(schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """Returns each rank's actions with their sends and receives inserted.

    A send follows the action whose output it sends. A receive is inserted at the point that its rank has reached when
    the send is posted, so that the two ranks of a pair list what they exchange in the same order, as NCCL requires.
    Stages on one device exchange nothing. O(n ranks) for n actions: in rounds, each rank runs its next action.

    Raises:
        InvalidSchedule: the order deadlocks.
        BapipeError: neighbouring stages share some devices, but not the same ones in the same order.
    """
    _check_neighbours(schedule)
    lowered: list[list[str]] = [[] for _ in schedule.order]
    reached = [0] * len(schedule.order)
    done: set[Action] = set()
    num_remaining = sum(map(len, schedule.order))
    while num_remaining:
        num_before = num_remaining
        for rank, actions in enumerate(schedule.order):
            if reached[rank] == len(actions) or not is_ready(actions[reached[rank]], schedule.num_stages, done):
                continue
            action = actions[reached[rank]]
            reached[rank] += 1
            num_remaining -= 1
            lowered[rank].append(str(action))
            done.add(action)
            if action.phase is not Phase.WEIGHT_GRAD:  # W makes the weights' gradients, which no other stage waits for
                _add_transfer(action, rank, schedule, lowered)
        if num_remaining == num_before:
            raise InvalidSchedule(f"deadlock: each waits for another: {_blocked(schedule, reached)}")
    return tuple(map(tuple, lowered))


def _blocked(schedule: Schedule, reached: Sequence[int]) -> str:
    orders = enumerate(zip(schedule.order, reached, strict=True))
    return ", ".join(f"rank {rank} at {actions[i]}" for rank, (actions, i) in orders if i < len(actions))


def receives_at_step_start(actions: Sequence[str]) -> tuple[str, ...]:
    """Returns a rank's lowered actions with every receive at the start of the step, in the order of the peers' sends.

    gloo starts a transfer only when both ends are posted. With all receives posted first, each into its own buffer, a
    transfer to a busy rank overlaps what that rank computes. NCCL runs the transfers of one pair in order on one
    stream, so a receive posted early would block the sends behind it: there receives keep their places.
    """
    return (*(a for a in actions if "RECV" in a), *(a for a in actions if "RECV" not in a))


def _check_neighbours(schedule: Schedule) -> None:
    for s in range(schedule.num_stages - 1):
        a, b = schedule.devices[s], schedule.devices[s + 1]
        if a != b and set(a) & set(b):
            raise BapipeError(
                f"stages {s} and {s + 1} share some of their devices only: give them the same devices in the same "
                "order, or none in common"
            )


def _add_transfer(action: Action, rank: int, schedule: Schedule, lowered: list[list[str]]) -> None:
    stage, phase, microbatch = action
    letter, target = ("F", stage + 1) if phase is Phase.FORWARD else ("B", stage - 1)
    if not 0 <= target < schedule.num_stages:
        return
    peer = schedule.rank_of(target, microbatch)
    if peer != rank:
        lowered[rank].append(f"{stage}SEND_{letter}{microbatch}")
        lowered[peer].append(f"{target}RECV_{letter}{microbatch}")
