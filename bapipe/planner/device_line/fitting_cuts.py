"""Cuts for tight memory, where equal shares of the time or of the bytes do not fit.

As many layers as fit on each stage, packed from the front and from the back, leave a range for each cut; within the
ranges the cuts of a plan are moved as little as possible. Where a stage with more layers never needs less memory, and
each layer alone fits on each stage, this finds cuts that fit if there are any for the plan's groups of devices.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.naive import naive_plans
from bapipe.planner.device_line.stage_memory import StageMemory
from bapipe.schedules import SCHEDULES


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
    packing, num_stages, last = _Packing(line, plan, memory), len(plan.counts), len(line.cuts) - 1
    lowest = [last] * (num_stages + 1)  # the boundaries from which on the stages behind fit. [cuts]
    for stage in reversed(range(num_stages)):
        lowest[stage] = packing.lowest_begin(stage, lowest[stage + 1])
        if lowest[stage] == lowest[stage + 1]:
            return None
    if lowest[0] > 0:
        return None
    boundaries = [0]
    for stage, cut in enumerate(plan.cuts[1:-1]):
        wanted = max(bisect_left(line.cuts, cut), lowest[stage + 1], boundaries[-1] + 1)
        boundaries.append(min(wanted, packing.highest_end(stage, boundaries[-1])))
        if boundaries[-1] < lowest[stage + 1] or boundaries[-1] == boundaries[-2]:
            return None  # more layers need less memory somewhere
    return (*(line.cuts[boundary] for boundary in boundaries), line.cuts[-1])


class _Packing:
    """Says which layers between boundaries fit on each stage of a plan. Every stage has one part at least."""

    def __init__(self, line: DeviceLine, plan: LinePlan, memory: StageMemory) -> None:
        self.cuts, self.num_stages, self.memory = line.cuts, len(plan.counts), memory
        firsts = [*accumulate(plan.counts, initial=0)]
        self.groups = [line.group(first, count) for first, count in zip(firsts, plan.counts, strict=False)]
        self.in_flight = [
            memory.in_flight(plan.schedule, firsts[-1] - first, count)
            for first, count in zip(firsts, plan.counts, strict=False)
        ]

    def lowest_begin(self, stage: int, end: int) -> int:
        """Returns the first boundary at which a stage that ends at one may begin so that it fits; `end` if none is.

        The first stage, which alone receives nothing, begins at 0 or not at all.
        """
        begins = range(stage, end if stage else 1)
        return stage + bisect_left(begins, True, key=lambda begin: self._fits(stage, begin, end))

    def highest_end(self, stage: int, begin: int) -> int:
        """Returns the last boundary at which a stage that begins at one may end so that it fits; `begin` if none is."""
        ends = range(begin + 1, len(self.cuts) - self.num_stages + stage + 1)
        return begin + bisect_left(ends, True, key=lambda end: not self._fits(stage, begin, end))

    def _fits(self, stage: int, begin: int, end: int) -> bool:
        layers = self.cuts[begin], self.cuts[end]
        return self.memory.recomputes(*layers, self.groups[stage], self.in_flight[stage]) is not None
