"""Good plans of a large problem without the search: equal shares, improved by hill climbing, timed by the simulator."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

import numpy as np

from bapipe.planner.inputs.validation import microbatch_sizes
from bapipe.planner.stages.intervals import IntArray
from bapipe.schedules import SCHEDULES
from benchmarks.certificates.judge import HandPlan, Judge

CUT_MOVES = (-16, -8, -4, -2, -1, 1, 2, 4, 8, 16)
SLOPES = (0.0, -0.02, 0.02)
"""By how much the share of a stage grows from one to the next: early stages have more micro-batches in flight and wait
less, so both are worth a start."""

NUM_CLIMBED = 4
"""The number of plans that are improved."""

MAX_SHIFTED = 8
"""A plan that single moves do not improve is climbed from again with cuts shifted by up to so many boundaries."""

MAX_TRIED = 60
"""The number of shapes of which plans are made before any is improved."""


class Challenger:
    """Looks for the fastest plan for some seconds of compute time.

    Attributes:
        best: the fastest so far, with its step time; None before one fits.
    """

    def __init__(self, judge: Judge, random: Random, seconds: float) -> None:
        self.judge, self.random = judge, random
        self.end_s = time.process_time() + seconds
        self.best: tuple[int, HandPlan] | None = None
        self._ranked: list[tuple[int, HandPlan]] = []

    def run(self) -> None:
        """Tries plans of many shapes, then improves the fastest, again and again from cuts a little off, to the end."""
        shapes = list(self._shapes())
        self.random.shuffle(shapes)
        shapes = [*self._largest(), *shapes[:MAX_TRIED]]
        for number, (schedule, size, groups) in enumerate(shapes):
            if number >= 4 and self._is_over(0.5):
                break
            for cuts in self._starts(schedule, size, groups):
                plan = HandPlan(schedule=schedule, microbatch_size=size, groups=groups, cuts=cuts)
                step_ns = self._try(plan)
                if step_ns is not None:
                    self._ranked.append((step_ns, plan))
        climbed = [self._climb(plan) for _, plan in sorted(self._ranked, key=lambda each: each[0])[:NUM_CLIMBED]]
        movable = [(step_ns, plan) for step_ns, plan in climbed if step_ns is not None and len(plan.cuts) > 2]
        while movable and not self._is_over():
            i = self.random.randrange(len(movable))
            step_ns, plan = self._climb(self._shifted(movable[i][1]))
            if step_ns is not None and step_ns < movable[i][0]:
                movable[i] = step_ns, plan

    def _is_over(self, share: float = 0.0) -> bool:
        return time.process_time() > self.end_s - share * max(0.0, self.end_s - time.process_time())

    def _try(self, plan: HandPlan) -> int | None:
        step_ns = self.judge.step_ns(plan)
        if step_ns is not None and (self.best is None or step_ns < self.best[0]):
            self.best = step_ns, plan
        return step_ns

    def _largest(self) -> Iterator[tuple[str, int, tuple[tuple[int, ...], ...]]]:
        """One stage per device, and one stage on all devices."""
        every = range(len(self.judge.cluster.devices))
        for size in self._sizes():
            for schedule in self.judge.options.schedules:
                for groups in (tuple((rank,) for rank in every), (self._sorted(every),)):
                    if self._may_be(schedule, size, groups):
                        yield schedule, size, groups

    def _shapes(self) -> Iterator[tuple[str, int, tuple[tuple[int, ...], ...]]]:
        """Equal groups of the first devices, and groups of random sizes."""
        num_devices = len(self.judge.cluster.devices)
        numbers = range(1, num_devices + 1) if num_devices <= 12 else [num_devices, num_devices - 1, num_devices // 2]
        for size in self._sizes():
            for schedule in self.judge.options.schedules:
                for used in numbers:
                    shapes = [[r] * (used // r) for r in (1, 2, 3, 4, 8, used) if used % r == 0]
                    shapes += [self._random_counts(used) for _ in range(3)]
                    for counts in shapes:
                        ends = [0, *accumulate(counts)]
                        groups = tuple(self._sorted(range(a, b)) for a, b in pairwise(ends))
                        if self._may_be(schedule, size, groups):
                            yield schedule, size, groups

    def _sizes(self) -> Sequence[int]:
        return microbatch_sizes(self.judge.profiles, self.judge.cluster, self.judge.options)

    def _random_counts(self, used: int) -> list[int]:
        counts: list[int] = []
        while sum(counts) < used:
            counts.append(min(self.random.choice([1, 1, 1, 2, 2, 3, 4]), used - sum(counts)))
        return counts

    def _sorted(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The fastest device first, as the search takes them."""
        return tuple(sorted(ranks, key=lambda rank: (self._ns_on(rank), rank)))

    def _ns_on(self, rank: int) -> float:
        device = self.judge.cluster.devices[rank]
        measured = self.judge.profiles[device.kind].measurements[-1].layers
        return sum(layer.forward_backward_ns for layer in measured) / device.speed

    def _may_be(self, schedule: str, size: int, groups: Sequence[tuple[int, ...]]) -> bool:
        options = self.judge.options
        most = max(map(len, groups))
        if most > 1 and (schedule not in SCHEDULES or not options.replicas):
            return False
        num_stages = self.judge.num_stages(schedule, groups)
        return most <= options.minibatch_size // size and num_stages <= len(self.judge.names)

    def _starts(self, schedule: str, size: int, groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Cuts in proportion to speed, with some slopes; cuts into equal numbers of layers; and into equal bytes."""
        profile = self.judge.profiles[self.judge.cluster.devices[0].kind]
        measured = profile.at(size)
        num_stages = self.judge.num_stages(schedule, groups)
        rates = np.ones(num_stages)
        if schedule in SCHEDULES:
            rates = np.array([len(group) / max(self._ns_on(rank) for rank in group) for group in groups])
        times = np.cumsum([0, *(m.forward_backward_ns for m in measured)])
        held = np.cumsum(
            [
                0,
                *(
                    2 * layer.param_bytes + layer.optimizer_state_bytes + m.stash_bytes
                    for layer, m in zip(profile.layers, measured, strict=True)
                ),
            ]
        )
        for slope in SLOPES:
            yield _cuts(times, rates * (1 + slope * np.arange(num_stages)).clip(0.1))
        yield _cuts(np.arange(len(times)), np.ones(num_stages))
        yield _cuts(held, np.ones(num_stages))

    def _climb(self, plan: HandPlan) -> tuple[int | None, HandPlan]:
        """Moves one cut at a time as long as that helps and time is left; returns the last plan and its step time."""
        best, improved = self._try(plan), True
        while improved:
            improved = False
            for s in range(1, len(plan.cuts) - 1):
                for move in CUT_MOVES:
                    cut = plan.cuts[s] + move
                    if not plan.cuts[s - 1] < cut < plan.cuts[s + 1]:
                        continue
                    if self._is_over():
                        return best, plan
                    moved = replace(plan, cuts=(*plan.cuts[:s], cut, *plan.cuts[s + 1 :]))
                    step_ns = self._try(moved)
                    if step_ns is not None and (best is None or step_ns < best):
                        best, plan, improved = step_ns, moved, True
        return best, plan

    def _shifted(self, plan: HandPlan) -> HandPlan:
        """The plan with one cut, or all from one to another, a little off; up to three times."""
        cuts = list(plan.cuts)
        for _ in range(self.random.choice((1, 2, 3))):
            first, last = sorted(self.random.randrange(1, len(cuts) - 1) for _ in range(2))
            last = first if self.random.random() < 0.5 else last
            by = self.random.choice((-1, 1)) * self.random.randint(1, MAX_SHIFTED)
            room = cuts[last + 1] - cuts[last] - 1 if by > 0 else cuts[first] - cuts[first - 1] - 1
            by = max(-room, min(room, by))
            cuts[first : last + 1] = [cut + by for cut in cuts[first : last + 1]]
        return replace(plan, cuts=tuple(cuts))


def _cuts(sums: IntArray, shares: IntArray) -> tuple[int, ...]:
    """Returns the cuts nearest to those that give each stage its share of a sum; every stage has a layer."""
    targets = np.cumsum(shares)[:-1] / shares.sum() * sums[-1]
    nearest = np.searchsorted((sums[1:] + sums[:-1]) / 2, targets)
    steps, last = np.arange(len(nearest)), len(sums) - 1
    apart = np.maximum.accumulate(np.maximum(nearest - steps, 1)) + steps
    return (0, *np.minimum(apart, last - len(nearest) + steps).tolist(), last)
