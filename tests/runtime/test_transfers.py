"""When the tensors that a rank sends are released: never late, and without a deadlock. Executions are abstract."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers
from torch import Tensor

from bapipe.runtime.evaluation import forwards_only, limited_sends
from bapipe.runtime.lowering import End, Transfer, finished_sends, lower_for, lower_schedule
from bapipe.runtime.transfers import Transfers
from bapipe.schedules import LOOPED, SCHEDULES
from bapipe.schedules.table import Action, Phase, Schedule, dependencies, parse_action
from tests.multiprocess.runtime_cases import random_order
from tests.strategies import drawn, examples


def random_schedule(random: Random) -> Schedule:
    """Stages on any ranks, some in several, with replicas of the first, of the last, or of both."""
    ranks: list[tuple[int, ...]] = [(random.randrange(4),) for _ in range(random.randint(2, 5))]
    for end in (0, -1):
        if random.random() < 0.4:
            ranks[end] = (4, 5) if end else (6, 7, 8)
    num = random.randint(3, 6)
    order = random_order(random.randrange(10**9), ranks, num, random.choice([0.0, 0.5, 1.0]))
    return Schedule(
        devices=tuple(ranks),
        num_microbatches=num,
        order=tuple(tuple(map(parse_action, actions)) for actions in order),
    )


NAMED = {
    **{name: make(3, 5) for name, make in SCHEDULES.items()},
    **{name: make(3, 6) for name, make in LOOPED.items()},
}


def sends(lowered: Iterable[Action | Transfer]) -> list[Transfer]:
    return [action for action in lowered if isinstance(action, Transfer) and action.end is End.SEND]


def taker(schedule: Schedule, send: Transfer) -> Action:
    """The action that waits for a send."""
    target = send.stage + (1 if send.is_forward else -1)
    phases = (Phase.FORWARD,) if send.is_forward else (Phase.BACKWARD, Phase.INPUT_GRAD)
    wanted = {Action(target, phase, send.microbatch) for phase in phases}
    return next(action for actions in schedule.order for action in actions if action in wanted)


def ancestors(schedule: Schedule) -> dict[Action, set[Action]]:
    """All actions that end before each action starts: the closure of dependencies and of the ranks' orders."""
    before: dict[Action, list[Action]] = {}
    existing = {action for actions in schedule.order for action in actions}
    for actions in schedule.order:
        for place, action in enumerate(actions):
            needed = [a for group in dependencies(action, schedule.num_stages) for a in group if a in existing]
            before[action] = [*needed, *actions[max(0, place - 1) : place]]
    found: dict[Action, set[Action]] = {}
    while len(found) < len(before):
        for action, direct in before.items():
            if action not in found and all(a in found for a in direct):
                found[action] = set(direct).union(*(found[a] for a in direct))
    return found


def check_releases(schedule: Schedule) -> None:
    """Every send is released at the first action that must come after the one that takes it, and only there."""
    closure = ancestors(schedule)
    for rank, actions in enumerate(schedule.order):
        released = finished_sends(schedule, rank)
        expected: dict[Action, set[Transfer]] = defaultdict(set)
        for send in sends(lower_schedule(schedule)[rank]):
            taken = taker(schedule, send)
            after = [action for action in actions if taken in closure[action]]
            if after:
                expected[after[0]].add(send)
        assert {action: set(names) for action, names in released.items()} == expected


def check_no_deadlock(schedule: Schedule, gloo: bool, dropped: frozenset[Transfer], random: Random) -> None:
    """Runs all ranks: a send is done when its receive is posted and the earlier transfers of the pair are done.

    `dropped` transfers do not take place. Waiting blocks a rank, which is stricter than NCCL.
    """
    lowered = lower_for(schedule, gloo=gloo)
    released = [finished_sends(schedule, rank) for rank in range(len(lowered))]
    needed: dict[Action, list[Transfer]] = defaultdict(list)  # the sends that an action receives
    before: dict[Transfer, list[Transfer]] = {}  # what must be posted for a send to be done
    channels: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for rank, own in enumerate(lowered):
        for send in (send for send in sends(own) if send not in dropped):
            target = taker(schedule, send)
            channel = channels[rank, schedule.rank_of(target.stage, target.microbatch)]
            channel += [send, send._replace(stage=target.stage, end=End.RECEIVE)]
            before[send] = list(channel)
            needed[target].append(send)
    reached, posted = [0] * len(lowered), set[Transfer]()

    def can_run(rank: int, action: Action | Transfer) -> bool:
        if isinstance(action, Transfer):
            return True
        waits = [*needed[action], *(send for send in released[rank].get(action, ()) if send not in dropped)]
        return all(posted.issuperset(before[send]) for send in waits)

    left = {rank for rank, own in enumerate(lowered) if own}
    while left:
        for rank in random.sample(sorted(left), len(left)):
            action = lowered[rank][reached[rank]]
            if can_run(rank, action):
                if isinstance(action, Transfer):
                    posted.add(action)
                reached[rank] += 1
                break
        else:
            blocked = [str(lowered[rank][reached[rank]]) for rank in left]
            pytest.fail(f"deadlock at {blocked} without {sorted(map(str, dropped))}")
        left = {rank for rank in left if reached[rank] < len(lowered[rank])}


@pytest.mark.parametrize("name", NAMED)
def test_named_schedules_release_what_is_certainly_sent(name: str) -> None:
    check_releases(NAMED[name])


@given(drawn(random_schedule))
@examples(40)
def test_random_schedules_release_what_is_certainly_sent(schedule: Schedule) -> None:
    check_releases(schedule)


@given(drawn(random_schedule), integers(0, 10**6))
@examples(40)
def test_waiting_for_sends_never_deadlocks(schedule: Schedule, seed: int) -> None:
    random = Random(seed)
    all_sends = [send for own in lower_schedule(schedule) for send in sends(own)]
    gradients = frozenset(send for send in all_sends if not send.is_forward)
    some = frozenset(send for send in all_sends if random.random() < 0.5)
    for dropped in (frozenset[Transfer](), gradients, some):
        check_no_deadlock(schedule, random.random() < 0.5, dropped, random)


def finished_as_text(schedule: Schedule, rank: int) -> dict[str, list[str]]:
    return {str(action): [*map(str, sends)] for action, sends in finished_sends(schedule, rank).items()}


def test_a_stage_keeps_no_more_sends_than_micro_batches_in_flight() -> None:
    schedule = SCHEDULES["1f1b"](2, 8)
    assert finished_as_text(schedule, 0) == {f"0B{m}": [f"0SEND_F{m}"] for m in range(8)}
    # The gradient of micro-batch 0 is taken by 0B0, after which rank 0 sends what 1F2 takes, and so on.
    assert finished_as_text(schedule, 1) == {f"1F{m + 2}": [f"1SEND_B{m}"] for m in range(6)}


@pytest.mark.parametrize("limit", [1, 3])
def test_an_evaluation_has_few_unfinished_sends(limit: int) -> None:
    """Nothing that a first stage runs depends on what the next one has done."""
    schedule = forwards_only(SCHEDULES["1f1b"](2, 8), 20)
    assert finished_sends(schedule, 0) == {}
    order = lower_for(schedule, gloo=True)[0]
    finished, posted = limited_sends(order, limit), list[Transfer]()
    for action in order:
        if isinstance(action, Transfer):
            posted.append(action)
            assert len(posted) <= limit + 1
        for send in finished.get(action, ()) if isinstance(action, Action) else ():
            posted.remove(send)
    assert sum(map(len, finished.values())) == 20 - limit - 1
    assert limited_sends(lower_for(schedule, gloo=True)[1], limit) == {}


class Work:
    """A send that holds its tensor until it is forgotten."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.waited = tensor, False

    def wait(self) -> None:
        self.waited = True


def test_tensors_are_forgotten_after_the_wait() -> None:
    channels: Any = SimpleNamespace(send=lambda tensor, target: Work(tensor), wait=lambda work, process: work.wait())
    first, second = (Transfer(0, End.SEND, True, m) for m in range(2))
    at = Transfers(channels, {Action(0, Phase.BACKWARD, 0): (first,)})
    alive = []
    for transfer in (first, second):
        tensor = torch.ones(3)
        alive.append(weakref.ref(tensor))
        at.post(transfer, [(tensor, 1)])
        del tensor
    at.before(Action(0, Phase.FORWARD, 1))
    assert [ref() is not None for ref in alive] == [True, True]
    at.before(Action(0, Phase.BACKWARD, 0))
    assert [ref() is not None for ref in alive] == [False, True]
    at.release_all()
    assert [ref() is not None for ref in alive] == [False, False]
