"""Cuts for tight memory, where equal shares of the time or of the bytes do not fit.

A stage with one more layer may need less memory if less is sent over its new cut: buffers for what it receives can be
most of what it holds. So a dynamic programme over stages and boundaries finds, of all cuts that fit, those that are
moved by the fewest boundaries in total.

If that takes too long, layers are packed greedily on the stages, from the front and from the back, which gives a range
for each cut; within the ranges the cuts of a plan are moved as little as possible. If a stage with more layers never
needs less memory, and each single layer fits on each stage, this also finds cuts that fit whenever there are any.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product

import numpy as np

from bapipe.planner.device_line.fitting_replicas import fitting_replicas
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.line_memory import LineMemory
from bapipe.planner.device_line.naive import naive_plans
from bapipe.schedules import SCHEDULES

MAX_TRIED = 50_000_000
"""The maximum number of stages that the dynamic programme tries, in a fifth of a second."""


def fitting_plans(line: DeviceLine, schedules: Sequence[str], sizes: Sequence[int]) -> Iterator[LinePlan | None]:
    """Yields plans that fit as far as is known without a table of actions, none with several stages per device.

    First come plans with any numbers of replicas, then naive ones with their cuts moved, those with the smallest bounds
    first. Yields None for each attempt that finds none, as an attempt takes up to half a second.
    """
    simple = [name for name in schedules if name in SCHEDULES]
    memory = {size: LineMemory(line, size) for size in sizes}
    for schedule, size in product(simple, sizes):
        found = fitting_replicas(line, schedule, memory[size])
        # They fit if all devices are used; with fewer of them 1F1B-2BP holds more.
        yield found if found is not None and seems_to_fit(line, found, memory[size]) else None
    for _, plan in naive_plans(line, simple, sizes, for_other_cuts=True):
        cuts = fitting_cuts(line, plan, memory[plan.microbatch_size])
        yield None if cuts is None else replace(plan, cuts=cuts)


def fitting_cuts(line: DeviceLine, plan: LinePlan, memory: LineMemory) -> tuple[int, ...] | None:
    """Returns the cuts nearest to those of a plan with which each stage fits, None if there are none."""
    boundaries = _Packing(line, plan, memory).boundaries()
    return boundaries and tuple(line.cuts[boundary] for boundary in boundaries)


def seems_to_fit(line: DeviceLine, plan: LinePlan, memory: LineMemory) -> bool:
    """Returns whether a plan seems to fit, without a table of actions; True if devices have several stages."""
    return plan.schedule not in SCHEDULES or _Packing(line, plan, memory).has_all()


class _Packing:
    """Finds which layers between boundaries fit on each stage of a plan. No stage may be empty."""

    def __init__(self, line: DeviceLine, plan: LinePlan, memory: LineMemory) -> None:
        self._num_stages, self._num = len(plan.counts), len(line.cuts)
        self._may_recompute = line.options.recompute
        self._wanted = np.array([bisect_left(line.cuts, cut) for cut in plan.cuts[1:]])
        stages = zip(accumulate(plan.counts, initial=0), plan.counts, strict=False)
        self._layers = memory.at_boundaries
        self._stages = memory.room(line, plan.schedule, sum(plan.counts), stages)

    def boundaries(self) -> tuple[int, ...] | None:
        """Returns the nearest boundaries between which all stages fit, None if there are none."""
        from bapipe.planner.device_line.fitting_programme import nearest_fitting_cuts

        moved, begins = (np.zeros((number, self._num), dtype=np.int64) for number in (2, self._num_stages))
        problem = self._layers, self._stages, self._may_recompute
        if not nearest_fitting_cuts(*problem, self._wanted, moved, begins, MAX_TRIED):
            return self._packed()
        boundaries = [self._num - 1]
        if moved[self._num_stages % 2, -1] < 0:
            return None
        for of_stage in reversed(begins):
            boundaries.append(int(of_stage[boundaries[-1]]))
        return tuple(reversed(boundaries))

    def has_all(self) -> bool:
        """Returns whether all stages fit with the cuts of the plan."""
        ends = self._wanted.tolist()
        return all(self._fits(stage, *ends) for stage, ends in enumerate(pairwise([0, *ends])))

    def _packed(self) -> tuple[int, ...] | None:
        """Returns boundaries by greedy packing; finds some if more layers never need less and each layer fits alone."""
        lowest = [self._num - 1] * (self._num_stages + 1)  # the boundaries from which on the later stages fit. [cuts]
        for stage in reversed(range(self._num_stages)):
            lowest[stage] = self._lowest_begin(stage, lowest[stage + 1])
            if lowest[stage] == lowest[stage + 1]:
                return None
        if lowest[0] > 0:
            return None
        boundaries = [0]
        for stage, wanted in enumerate(self._wanted[:-1].tolist()):
            end = max(wanted, lowest[stage + 1], boundaries[-1] + 1)
            boundaries.append(min(end, self._highest_end(stage, boundaries[-1])))
            if boundaries[-1] < lowest[stage + 1] or boundaries[-1] == boundaries[-2]:
                return None  # more layers need less memory somewhere
        return (*boundaries, self._num - 1)

    def _lowest_begin(self, stage: int, end: int) -> int:
        """Returns the first boundary at which a stage that ends at `end` may begin so that it fits; `end` if none.

        The first stage, the only one that receives nothing, can only begin at 0.
        """
        begins = range(stage, end if stage else 1)
        return stage + bisect_left(begins, True, key=lambda begin: self._fits(stage, begin, end))

    def _highest_end(self, stage: int, begin: int) -> int:
        """Returns the last boundary at which a stage that begins at `begin` may end so that it fits, else `begin`."""
        ends = range(begin + 1, self._num - self._num_stages + stage + 1)
        return begin + bisect_left(ends, True, key=lambda end: not self._fits(stage, begin, end))

    def _fits(self, stage: int, begin: int, end: int) -> bool:
        from bapipe.planner.device_line.fitting_programme import fits

        workspace = int(self._layers.workspace[begin:end].max())
        return bool(fits(self._layers, self._stages, self._may_recompute, stage, begin, end, workspace))
