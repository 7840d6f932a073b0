"""The schedule as data: which device runs which action in which order.

Compute only. Transfers follow from the order and the ranks of the stages, so they are never stored.
The text of an action (`2F0`: stage 2, forward, micro-batch 0) is the one torch uses.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from bapipe.errors import InvalidSchedule

_ACTION = re.compile(r"(0|[1-9][0-9]{0,8})([FBIW])(0|[1-9][0-9]{0,8})")
_ACTION_LINE = re.compile(rf"^{_ACTION.pattern}$", re.MULTILINE)


class Phase(StrEnum):
    """One kind of work a stage does for a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"  # I, then W
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


_PHASES = {phase.value: phase for phase in Phase}


class Action(NamedTuple):
    """One phase of one micro-batch on one stage."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Returns the action that `text`, such as `2F0`, denotes.

    Raises:
        InvalidSchedule: it denotes none.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise InvalidSchedule(f"'{text}' is no action; want stage, one of F B I W, micro-batch, such as '2F0'")
    return Action(int(match[1]), _PHASES[match[2]], int(match[3]))


def parse_actions(texts: Sequence[str]) -> tuple[Action, ...] | None:
    """Returns the actions that the texts denote, as `parse_action` does but all at once; None if one denotes none."""
    joined = "\n".join(texts)
    found = _ACTION_LINE.findall(joined)
    if len(found) != len(texts) or joined.count("\n") != max(len(texts) - 1, 0):
        return None
    return tuple(Action(int(stage), _PHASES[phase], int(microbatch)) for stage, phase, microbatch in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An order of actions for each device.

    Attributes:
        devices: `devices[s]` are the ranks that run stage `s`; micro-batch m runs on `devices[s][m % len]`.
        num_microbatches: micro-batches in one step.
        order: `order[r]` is what rank `r` runs, first to last; empty for a rank without a stage.
    """

    devices: tuple[tuple[int, ...], ...]
    num_microbatches: int
    order: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.devices)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Returns the rank that runs a micro-batch of a stage."""
        replicas = self.devices[stage]
        return replicas[microbatch % len(replicas)]


def one_per_rank(num_ranks: int, num_microbatches: int, order_of_rank: Callable[[int], tuple[Action, ...]]) -> Schedule:
    """Returns the schedule with stage s on rank s, and each rank's order from `order_of_rank`."""
    return Schedule(
        devices=tuple((rank,) for rank in range(num_ranks)),
        num_microbatches=num_microbatches,
        order=tuple(map(order_of_rank, range(num_ranks))),
    )


def stages_of_ranks(schedule: Schedule) -> list[list[int]]:
    """Returns the stages that each rank runs, ascending. [ranks]"""
    stages: list[list[int]] = [[] for _ in schedule.order]
    for stage, ranks in enumerate(schedule.devices):
        for rank in ranks:
            stages[rank].append(stage)
    return stages


@lru_cache(maxsize=1 << 14)
def dependencies(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """Returns groups of actions; an action can start when one action of each group has ended.

    F waits for F of the stage before. B and I wait for their own F, and for B or I of the stage after. W waits for I.
    The first of these is the one on the same stage.
    """
    stage, phase, microbatch = action
    if phase is Phase.FORWARD:
        return ((Action(stage - 1, phase, microbatch),),) if stage > 0 else ()
    if phase is Phase.WEIGHT_GRAD:
        return ((Action(stage, Phase.INPUT_GRAD, microbatch),),)
    same_stage_forward = (Action(stage, Phase.FORWARD, microbatch),)
    if stage == num_stages - 1:
        return (same_stage_forward,)
    later = (Action(stage + 1, Phase.BACKWARD, microbatch), Action(stage + 1, Phase.INPUT_GRAD, microbatch))
    return same_stage_forward, later


def is_ready(action: Action, num_stages: int, done: AbstractSet[Action]) -> bool:
    """Returns whether an action can start once the actions in `done` have ended."""
    return not any(map(done.isdisjoint, dependencies(action, num_stages)))


def check(schedule: Schedule) -> None:
    """Raises InvalidSchedule unless the table is complete and every action is on its rank, in a legal order.

    Complete: every stage does F and then B (or I and then W) of every micro-batch once. The last stage does its F in
    ascending micro-batch order on each of its devices, because torch's runtime finds losses by their order of arrival.
    A table that passes can still deadlock; `simulate` finds that.
    """
    if not _is_legal(schedule):
        _explain(schedule)


def _is_legal(schedule: Schedule) -> bool:
    """Returns whether `check` passes, in one pass over the actions.

    The state of a micro-batch on a stage is 0 at first, 1 after F, 2 after I, and 3 after B or W. This order of
    states is the rule of `dependencies` for one stage.
    """
    num, last, devices = schedule.num_microbatches, schedule.num_stages - 1, schedule.devices
    state_before = dict(zip(Phase, (0, 1, 1, 2), strict=True))
    state_after = dict(zip(Phase, (1, 3, 2, 3), strict=True))
    state = bytearray(num * (last + 1))
    for rank, actions in enumerate(schedule.order):
        newest = -1
        for stage, phase, microbatch in actions:
            if not (0 <= stage <= last and 0 <= microbatch < num):
                return False
            replicas, index = devices[stage], stage * num + microbatch
            if replicas[microbatch % len(replicas)] != rank or state[index] != state_before[phase]:
                return False
            state[index] = state_after[phase]
            if stage == last and phase is Phase.FORWARD:
                if microbatch < newest:
                    return False
                newest = microbatch
    return state.count(3) == len(state)


def _explain(schedule: Schedule) -> None:
    """Raises InvalidSchedule with the first fault of a table that is not legal."""
    seen: Counter[Action] = Counter()
    for rank, actions in enumerate(schedule.order):
        for place, action in enumerate(actions):
            _check_place(schedule, rank, place, action)
            seen[action] += 1
            if seen[action] > 1:
                raise InvalidSchedule(f"rank {rank}, action {place}: {action} comes a second time")
            for needed, *_ in dependencies(action, schedule.num_stages):
                if needed.stage == action.stage and not seen[needed]:
                    raise InvalidSchedule(f"rank {rank}, action {place}: {action} comes before its {needed.phase}")
        forwards = [a.microbatch for a in actions if a.stage == schedule.num_stages - 1 and a.phase is Phase.FORWARD]
        if forwards != sorted(forwards):
            raise InvalidSchedule(
                f"rank {rank}: the last stage must run F in ascending micro-batch order, not {forwards}"
            )
    _check_complete(schedule, seen)


def _check_place(schedule: Schedule, rank: int, place: int, action: Action) -> None:
    where = f"rank {rank}, action {place}: {action}"
    if action.stage >= schedule.num_stages:
        raise InvalidSchedule(f"{where} names stage {action.stage}; there are {schedule.num_stages} stages")
    if action.microbatch >= schedule.num_microbatches:
        raise InvalidSchedule(
            f"{where} names micro-batch {action.microbatch}; there are {schedule.num_microbatches} micro-batches"
        )
    want = schedule.rank_of(action.stage, action.microbatch)
    if want != rank:
        raise InvalidSchedule(f"{where} belongs on rank {want}")


def _check_complete(schedule: Schedule, seen: Counter[Action]) -> None:
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            has = {phase: seen[Action(stage, phase, microbatch)] for phase in Phase}
            whole = has[Phase.BACKWARD], has[Phase.INPUT_GRAD], has[Phase.WEIGHT_GRAD]
            if not has[Phase.FORWARD] or whole not in ((1, 0, 0), (0, 1, 1)):
                got = [str(Action(stage, p, microbatch)) for p in Phase if has[p]]
                raise InvalidSchedule(
                    f"stage {stage}, micro-batch {microbatch}: has {', '.join(got) or 'nothing'}; "
                    "want F and B, or F, I and W"
                )
