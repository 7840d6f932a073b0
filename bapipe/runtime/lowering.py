"""Lowers a schedule: adds the sends and receives to its actions, in an order that cannot deadlock.

It also finds when each send is certainly complete, so that its tensors can be freed.

torch's own lowering (`_prepare_schedule_with_comms`) assumes one rank per stage; here a stage may have replicas, which
take the micro-batches in turn.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from bapipe.errors import BapipeError, InvalidSchedule
from bapipe.schedules.table import Action, Phase, Schedule, dependencies, is_ready


class End(StrEnum):
    """One end of a transfer."""

    SEND = "SEND"
    RECEIVE = "RECV"


class Transfer(NamedTuple):
    """A send or receive of a stage: of a forward's outputs, or of gradients. As text `0SEND_F1`, as in torch."""

    stage: int
    end: End
    is_forward: bool
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.end}_{'F' if self.is_forward else 'B'}{self.microbatch}"


Lowered = tuple[Action | Transfer, ...]
"""The actions of a rank with its sends and receives."""


def lower_schedule(schedule: Schedule) -> tuple[Lowered, ...]:
    """Returns each rank's actions with their sends and receives inserted.

    A send follows the action whose output it sends. A receive is inserted where its rank is in an execution of the
    schedule when the send is posted, so that two ranks list what they exchange in the same order, as NCCL requires.
    Stages on one device exchange nothing. O(n ranks) for n actions.

    Raises:
        InvalidSchedule: the order deadlocks.
        BapipeError: neighbouring stages share some devices, but not the same ones in the same order.
    """
    _check_neighbours(schedule)
    lowered: list[list[Action | Transfer]] = [[] for _ in schedule.order]
    for rank, action in _execution(schedule):
        lowered[rank].append(action)
        receiver = _receiver(action, schedule)
        if receiver is not None:
            lowered[rank].append(_send_of(action))
            lowered[receiver.rank].append(receiver.receive)
    return tuple(map(tuple, lowered))


def finished_sends(schedule: Schedule, rank: int) -> dict[Action, tuple[Transfer, ...]]:
    """Returns, by action of a rank, the rank's sends that are certainly complete before the action starts.

    A send is complete when the receiving action, which uses the sent tensors, has started. It is listed at the sender's
    first action that must come after the receiving one, by the dependencies of the schedule and the orders of the
    ranks, so waiting for it there causes no delay. The send of a micro-batch's F is listed at its B or I at the latest.
    Sends without such an action are left out.

    Waiting for a send cannot deadlock: `lower_schedule` lists both ends of a transfer at one moment of an execution in
    which every rank runs its list in order, so each send could even be waited for as soon as it is posted. This still
    holds if transfers are left out because their tensors have no gradient, so that actions start earlier than in the
    schedule, and if receives are posted earlier than listed.

    O(n (ranks + unfinished sends)) for n actions.
    """
    own = {action: receiver for action in schedule.order[rank] if (receiver := _receiver(action, schedule))}
    peers = sorted({receiver.rank for receiver in own.values()})
    taken_at = {  # by receive, (index in `peers`, index in the order of that rank) of the action that needs it
        receive_of(action): (column, place)
        for column, peer in enumerate(peers)
        for place, action in enumerate(schedule.order[peer])
        if action.phase is not Phase.WEIGHT_GRAD
    }
    finished: dict[Action, tuple[Transfer, ...]] = {}
    pending: dict[Action, tuple[int, int]] = {}
    for action, started in _started_before(schedule, peers, rank):
        done = [send for send, (column, place) in pending.items() if place < started[column]]
        if done:
            finished[action] = tuple(map(_send_of, done))
        for send in done:
            del pending[send]
        if action in own:
            pending[action] = taken_at[own[action].receive]
    return finished


def _started_before(schedule: Schedule, peers: Sequence[int], rank: int) -> Iterator[tuple[Action, tuple[int, ...]]]:
    """Yields each action of a rank with the number of actions of each peer that must end before it starts. [peers]

    By vector clocks (Mattern 1988).
    """
    column = {peer: i for i, peer in enumerate(peers)}
    clocks = [(0,) * len(peers) for _ in schedule.order]  # by rank: after its last action so far
    after: dict[Action, tuple[int, ...]] = {}
    for at, action in _execution(schedule):
        clock = clocks[at]
        for group in dependencies(action, schedule.num_stages):
            clock = tuple(map(max, clock, *(after[needed] for needed in group if needed in after)))
        if at == rank:
            yield action, clock
        if at in column:
            clock = tuple(count + (i == column[at]) for i, count in enumerate(clock))
        clocks[at] = after[action] = clock


def receive_of(action: Action) -> Transfer:
    """Returns the receive of the tensors that F, B or I of a stage needs from the neighbouring stage."""
    return _send_of(action)._replace(end=End.RECEIVE)


def _send_of(action: Action) -> Transfer:
    """Returns the send of the tensors that F, B or I of a stage computes for the neighbouring stage."""
    return Transfer(action.stage, End.SEND, action.phase is Phase.FORWARD, action.microbatch)


def _execution(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yields (rank, action) in an order in which they can run: in rounds, each rank runs its next action if ready.

    Raises:
        InvalidSchedule: the order deadlocks.
    """
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
            done.add(action)
            yield rank, action
        if num_remaining == num_before:
            raise InvalidSchedule(f"deadlock: each waits for another: {_blocked(schedule, reached)}")


def _blocked(schedule: Schedule, reached: Sequence[int]) -> str:
    orders = enumerate(zip(schedule.order, reached, strict=True))
    return ", ".join(f"rank {rank} at {actions[i]}" for rank, (actions, i) in orders if i < len(actions))


def lower_for(schedule: Schedule, *, gloo: bool) -> tuple[Lowered, ...]:
    """Returns each rank's lowered actions, with receives posted early for gloo, but not for NCCL.

    An NCCL receive blocks its stream on the GPU until the send arrives. Where `lower_schedule` puts it, the send
    depends only on actions that the receiver has launched before. If it were posted earlier, the send could depend on
    an action that the receiver has yet to launch. Its host would never launch that one if it first waited for the GPU,
    as CUDA does when it loads a kernel for the first time, and torch's allocator when memory is short.
    """
    lowered = lower_schedule(schedule)
    return tuple(map(receives_at_step_start, lowered)) if gloo else lowered


def receives_at_step_start(actions: Lowered) -> Lowered:
    """Returns a rank's lowered actions with every receive at the start of the step, in the order of the peers' sends.

    gloo starts a transfer only when both ends are posted. With all receives posted first, each into its own buffer, a
    transfer to a busy rank overlaps what that rank computes.
    """
    return tuple(sorted(actions, key=lambda action: not (isinstance(action, Transfer) and action.end is End.RECEIVE)))


def _check_neighbours(schedule: Schedule) -> None:
    for s in range(schedule.num_stages - 1):
        a, b = schedule.devices[s], schedule.devices[s + 1]
        if a != b and set(a) & set(b):
            raise BapipeError(
                f"stages {s} and {s + 1} share only some of their devices: give them the same devices in the same "
                "order, or none in common"
            )


class _Receiver(NamedTuple):
    rank: int
    receive: Transfer


def _receiver(action: Action, schedule: Schedule) -> _Receiver | None:
    """Returns the rank to which an action's output is sent, and the receive there; None if it is not sent."""
    stage, phase, microbatch = action
    if phase is Phase.WEIGHT_GRAD:  # W makes the weights' gradients, which no other stage waits for
        return None
    target = stage + 1 if phase is Phase.FORWARD else stage - 1
    if not 0 <= target < schedule.num_stages:
        return None
    rank = schedule.rank_of(target, microbatch)
    if rank == schedule.rank_of(stage, microbatch):
        return None
    return _Receiver(rank, Transfer(target, End.RECEIVE, phase is Phase.FORWARD, microbatch))
