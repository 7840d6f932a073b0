"""The sends and receives between a schedule's actions, as torch writes them: `0SEND_F1`, `1RECV_F1`."""

from collections.abc import Sequence

from bapipe.errors import BapipeError, InvalidSchedule
from bapipe.schedules.table import Action, Phase, Schedule

_BACKWARDS = (Phase.BACKWARD, Phase.INPUT_GRAD)


def with_transfers(schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """Returns each rank's actions with what it sends right after the action that makes it.

    A receive stands at the place its rank has reached when the send is posted, so that two ranks name what they
    exchange in the same order; stages on one device exchange nothing. O(n ranks) for n actions.

    Raises:
        InvalidSchedule: the order deadlocks.
        BapipeError: neighbouring stages share some devices, but not the same ones in the same order.
    """
    _check_neighbours(schedule)
    lowered: list[list[str]] = [[] for _ in schedule.order]
    reached = [0] * len(schedule.order)
    done: set[tuple[int, bool, int]] = set()  # (stage, whether forward, micro-batch)
    left = sum(map(len, schedule.order))
    while left:
        before = left
        for rank, actions in enumerate(schedule.order):
            if reached[rank] == len(actions) or not _ready(actions[reached[rank]], schedule.num_stages, done):
                continue
            action = actions[reached[rank]]
            reached[rank], left = reached[rank] + 1, left - 1
            lowered[rank].append(str(action))
            if action.phase is Phase.WEIGHT_GRAD:
                continue
            done.add((action.stage, action.phase is Phase.FORWARD, action.microbatch))
            _exchange(action, rank, schedule, lowered)
        if left == before:
            stuck = next(actions[at] for actions, at in zip(schedule.order, reached, strict=True) if at < len(actions))
            raise InvalidSchedule(f"the order deadlocks: {stuck} waits for what comes after it")
    return tuple(map(tuple, lowered))


def receives_first(actions: Sequence[str]) -> tuple[str, ...]:
    """Returns a rank's lowered actions with every receive at the start of the step, in the order of the peers' sends.

    Each has a buffer of its own, and gloo starts a transfer only when both ends are posted: a transfer to a busy rank
    then overlaps what that rank computes. NCCL queues what one pair exchanges, so there receives keep their places.
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


def _ready(action: Action, num_stages: int, done: set[tuple[int, bool, int]]) -> bool:
    stage, phase, microbatch = action
    if phase is Phase.FORWARD:
        return stage == 0 or (stage - 1, True, microbatch) in done
    if phase in _BACKWARDS:
        return stage == num_stages - 1 or (stage + 1, False, microbatch) in done
    return True


def _exchange(action: Action, rank: int, schedule: Schedule, lowered: list[list[str]]) -> None:
    stage, phase, microbatch = action
    letter, target = ("F", stage + 1) if phase is Phase.FORWARD else ("B", stage - 1)
    if not 0 <= target < schedule.num_stages:
        return
    peer = schedule.rank_of(target, microbatch)
    if peer != rank:
        lowered[rank].append(f"{stage}SEND_{letter}{microbatch}")
        lowered[peer].append(f"{target}RECV_{letter}{microbatch}")
