"""The schedule as data: which device runs which action in which order.

Compute only. Transfers follow from the order and from where the stages are, so they are never stored.
The text of an action (`2F0`: stage 2, forward, micro-batch 0) is the one torch uses.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from bapipe.errors import InvalidSchedule

_ACTION = re.compile(r"(0|[1-9][0-9]{0,8})([FBIW])(0|[1-9][0-9]{0,8})")


class Phase(StrEnum):
    """One kind of work a stage does for a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"  # I, then W
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


class Action(NamedTuple):
    """One phase of one micro-batch on one stage."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Returns the action that `text`, such as `2F0`, stands for.

    Raises:
        InvalidSchedule: it stands for none.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise InvalidSchedule(f"'{text}' is no action; want stage, one of F B I W, micro-batch, such as '2F0'")
    return Action(int(match[1]), Phase(match[2]), int(match[3]))


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


def check(schedule: Schedule) -> None:
    """Raises InvalidSchedule unless the table is complete and every action is where it belongs.

    Complete: every stage does F and then B (or I and then W) of every micro-batch once. The last stage does its F in
    ascending micro-batch order on each of its devices, because torch's runtime finds losses by their order of arrival.
    A table that passes can still deadlock; `simulate` finds that.
    """
    if not _is_legal(schedule):
        _explain(schedule)


def _is_legal(schedule: Schedule) -> bool:
    """Whether `check` passes, found out quickly: F, B, I and W find 0, 1, 1, 2 and leave 1, 3, 2, 3."""
    num, last, devices = schedule.num_microbatches, schedule.num_stages - 1, schedule.devices
    finds, leaves = dict(zip(Phase, (0, 1, 1, 2), strict=True)), dict(zip(Phase, (1, 3, 2, 3), strict=True))
    done = bytearray(num * (last + 1))
    for rank, actions in enumerate(schedule.order):
        newest = -1
        for stage, phase, microbatch in actions:
            if not (0 <= stage <= last and 0 <= microbatch < num):
                return False
            replicas, own = devices[stage], stage * num + microbatch
            if replicas[microbatch % len(replicas)] != rank or done[own] != finds[phase]:
                return False
            done[own] = leaves[phase]
            if stage == last and phase is Phase.FORWARD:
                if microbatch < newest:
                    return False
                newest = microbatch
    return done.count(3) == len(done)


def _explain(schedule: Schedule) -> None:
    seen: Counter[Action] = Counter()
    for rank, actions in enumerate(schedule.order):
        for place, action in enumerate(actions):
            _check_place(schedule, rank, place, action)
            seen[action] += 1
            if seen[action] > 1:
                raise InvalidSchedule(f"rank {rank}, action {place}: {action} comes a second time")
            for needed in _own_needs(action, seen):
                raise InvalidSchedule(f"rank {rank}, action {place}: {action} comes before its {needed}")
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


def _own_needs(action: Action, seen: Counter[Action]) -> Sequence[str]:
    """What of the same stage and micro-batch must come before `action` and has not."""
    stage, phase, microbatch = action
    if phase is Phase.FORWARD:
        return ()
    if phase is Phase.WEIGHT_GRAD:
        return () if seen[Action(stage, Phase.INPUT_GRAD, microbatch)] else ("I",)
    return () if seen[Action(stage, Phase.FORWARD, microbatch)] else ("F",)


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
