"""Cuts for tight memory, where equal shares of the time or of the bytes do not fit.

A stage with one layer more may need less memory, where less is sent over its new cut: buffers for what it receives can
be most of what it holds. So cuts are found by a dynamic programme over stages and boundaries: of all cuts that fit,
those that are moved by the fewest boundaries in all.

Where that takes too long, as many layers as fit on each stage, packed from the front and from the back, leave a range
for each cut; within the ranges the cuts of a plan are moved as little as possible. If a stage with more layers never
needs less memory, and each layer alone fits on each stage, this finds cuts that fit if there are any, too.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from bapipe.planner.device_line.in_flight import most_held
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.naive import naive_plans
from bapipe.planner.device_line.stage_memory import StageMemory
from bapipe.schedules import SCHEDULES
from bapipe.simulator.interval_costs import BoolArray

MAX_ROUNDS = 3_000
"""The dynamic programme has a round for each stage and number of boundaries that it may hold: so many take half a
second at most."""


def fitting_plans(line: DeviceLine, schedules: Sequence[str], sizes: Sequence[int]) -> Iterator[LinePlan]:
    """Yields the naive plans with their cuts moved so that they fit, as far as is known without a table of actions.

    Those first whose devices hold least: on most devices, in most stages, under GPipe last, with the smallest
    micro-batches. Of schedules with several stages per device there are none.
    """
    simple = [name for name in schedules if name in SCHEDULES]
    plans = [plan for _, plan in naive_plans(line, simple, sizes, may_lack_memory=True)]
    plans.sort(key=lambda each: (-sum(each.counts), -len(each.counts), each.schedule == "gpipe", each.microbatch_size))
    memory = {size: StageMemory(line, size) for size in sizes}
    yielded: set[LinePlan] = set()
    for plan in plans:
        cuts = fitting_cuts(line, plan, memory[plan.microbatch_size])
        if cuts is not None:
            fitting = replace(plan, cuts=cuts)
            if fitting not in yielded:
                yielded.add(fitting)
                yield fitting


def fitting_cuts(line: DeviceLine, plan: LinePlan, memory: StageMemory) -> tuple[int, ...] | None:
    """Returns the cuts nearest to those of a plan with which each stage fits, None if there are none."""
    stages = _Stages(line, plan, memory)
    boundaries = _nearest(line, plan, stages) if stages.num_rounds <= MAX_ROUNDS else _packed(line, plan, stages)
    return boundaries and tuple(line.cuts[boundary] for boundary in boundaries)


def _nearest(line: DeviceLine, plan: LinePlan, stages: "_Stages") -> tuple[int, ...] | None:
    """Returns boundaries between which all stages fit, the nearest to those of a plan; None if there are none."""
    num, num_stages = len(line.cuts), len(plan.counts)
    moved = np.full(num, np.inf)  # by how many boundaries the cuts up to each one are moved in all
    moved[0] = 0
    came_from = []
    for stage, cut in enumerate(plan.cuts[1:]):
        before, moved, begins = moved, np.full(num, np.inf), np.zeros(num, dtype=np.int64)
        last = num - (num_stages - stage - 1)
        own = np.abs(np.arange(num) - bisect_left(line.cuts, cut))
        for length in range(1, stages.longest[stage] + 1):
            ends = np.arange(length, last)
            total = np.where(stages.fit(stage, length)[: ends.size], before[ends - length] + own[ends], np.inf)
            is_less = total < moved[ends]
            moved[ends[is_less]], begins[ends[is_less]] = total[is_less], ends[is_less] - length
        came_from.append(begins)
    if moved[-1] == np.inf:
        return None
    boundaries = [num - 1]
    for begins in reversed(came_from):
        boundaries.append(int(begins[boundaries[-1]]))
    return tuple(reversed(boundaries))


def _packed(line: DeviceLine, plan: LinePlan, stages: "_Stages") -> tuple[int, ...] | None:
    """The same where more layers never need less memory, and each layer alone fits on each stage."""
    num_stages, last = len(plan.counts), len(line.cuts) - 1
    lowest = [last] * (num_stages + 1)  # the boundaries from which on the stages behind fit. [cuts]
    for stage in reversed(range(num_stages)):
        lowest[stage] = stages.lowest_begin(stage, lowest[stage + 1])
        if lowest[stage] == lowest[stage + 1]:
            return None
    if lowest[0] > 0:
        return None
    boundaries = [0]
    for stage, cut in enumerate(plan.cuts[1:-1]):
        wanted = max(bisect_left(line.cuts, cut), lowest[stage + 1], boundaries[-1] + 1)
        boundaries.append(min(wanted, stages.highest_end(stage, boundaries[-1])))
        if boundaries[-1] < lowest[stage + 1] or boundaries[-1] == boundaries[-2]:
            return None  # more layers need less memory somewhere
    return (*boundaries, last)


class _Stages:
    """Says which layers between boundaries fit on each stage of a plan. Every stage has one part at least.

    Attributes:
        longest: how many boundaries a stage goes on for at most. [stages]
    """

    def __init__(self, line: DeviceLine, plan: LinePlan, memory: StageMemory) -> None:
        self._cuts, self._num_stages, self._memory = np.array(line.cuts), len(plan.counts), memory
        firsts = [*accumulate(plan.counts, initial=0)]
        self._groups = [line.group(first, count) for first, count in zip(firsts, plan.counts, strict=False)]
        self._most = [
            most_held(plan.schedule, first, firsts[-1] - first, memory.num_microbatches, count)
            for first, count in zip(firsts, plan.counts, strict=False)
        ]
        self._workspace = [np.maximum.reduceat(memory.workspace, self._cuts[:-1])]  # by lengths. [lengths][begins]
        self.longest = [self._longest(stage) for stage in range(self._num_stages)]

    @property
    def num_rounds(self) -> int:
        """What `_nearest` takes."""
        return sum(self.longest)

    def _longest(self, stage: int) -> int:
        held = self._memory.least_held(self._most[stage])[self._cuts]
        last = np.searchsorted(held, held + self._memory.limit(self._groups[stage]), side="right") - 1
        return int(min((last - np.arange(held.size)).max(), held.size - self._num_stages))

    def fit(self, stage: int, length: int) -> BoolArray:
        """Returns whether a stage from each boundary on fits, so many boundaries long. [boundaries - length]"""
        while len(self._workspace) < length:
            shorter, more = self._workspace[-1], self._workspace[0][len(self._workspace) :]
            self._workspace.append(np.maximum(shorter[:-1], more))
        layers = self._cuts[:-length], self._cuts[length:], self._workspace[length - 1]
        return self._memory.fits(*layers, self._groups[stage], self._most[stage])

    def lowest_begin(self, stage: int, end: int) -> int:
        """Returns the first boundary at which a stage that ends at one may begin so that it fits; `end` if none is.

        The first stage, which alone receives nothing, begins at 0 or not at all.
        """
        begins = range(stage, end if stage else 1)
        return stage + bisect_left(begins, True, key=lambda begin: self._fits(stage, begin, end))

    def highest_end(self, stage: int, begin: int) -> int:
        """Returns the last boundary at which a stage that begins at one may end so that it fits; `begin` if none is."""
        ends = range(begin + 1, len(self._cuts) - self._num_stages + stage + 1)
        return begin + bisect_left(ends, True, key=lambda end: not self._fits(stage, begin, end))

    def _fits(self, stage: int, begin: int, end: int) -> bool:
        first, last = int(self._cuts[begin]), int(self._cuts[end])
        workspace = self._memory.workspace[first:last].max()
        return bool(self._memory.fits(first, last, workspace, self._groups[stage], self._most[stage]))
