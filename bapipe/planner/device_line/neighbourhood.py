"""Moves from one plan on a line of devices to others like it, and a climb along those that make the step shorter.

A move changes the cuts, the numbers of devices, or both: one cut, or all from one to another, by a few boundaries,
alone or with the devices that these layers are worth; a few devices from one stage to another; as many as a stage needs
for one micro-batch less on each; a stage is split, or merged with the next; devices that a stage does not need are left
idle. One to three moves at a time are drawn at random, always with the same seed. They are kept if the score is no more
than a little worse, by less and less (threshold accepting, Dueck and Scheuer 1990).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import floor, inf
from random import Random

from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.simulator.interval_costs import prefix_sums

NUM_MOVES = (1, 1, 1, 2, 3)
"""How many moves are made at once."""

CUT_STEPS, DEVICE_STEPS = (1, 2, 3), (1, 1, 2, 3, 5, 8, 15)
"""By how many boundaries a cut is moved, and how many devices at once."""

MANY_BOUNDARIES = 200
"""In longer chains cuts are also moved by so many times as much as there are so many boundaries."""

FIRST_THRESHOLD, HALVED_AFTER = 5e-4, 900
"""By which part a score may be worse than the one before it at first, and after how many neighbours by half of that."""


Score = Callable[[LinePlan, float], float]
"""The score of a plan, less being better; if it is above the second argument, any such number."""


@dataclass(slots=True)
class _Draft:
    """A plan while it is changed: the boundaries of its cuts, the devices of its stages, and of all.

    `devices_before` are those that the layers before each boundary are worth, if all layers share the devices equally.
    Invariant: one boundary more than stages. Whether each stage has a layer and a device is checked at the end.
    """

    cuts: list[int]
    counts: list[int]
    num_devices: int
    num_microbatches: int
    devices_before: tuple[float, ...]

    @property
    def last_boundary(self) -> int:
        return len(self.devices_before) - 1

    @property
    def num_idle(self) -> int:
        return self.num_devices - sum(self.counts)

    @property
    def is_plan(self) -> bool:
        counts = self.counts
        are_apart = all(a < b for a, b in pairwise(self.cuts))
        return are_apart and self.num_idle >= 0 and 1 <= min(counts) <= max(counts) <= self.num_microbatches

    def enough(self, num_each: int) -> int:
        """Returns the fewest devices with no more than so many micro-batches each."""
        return -(-self.num_microbatches // max(1, num_each))


def neighbours(line: DeviceLine, plan: LinePlan, random: Random) -> Iterator[LinePlan]:
    """Yields plans like one, at random and without end; some may not fit."""
    index = {cut: boundary for boundary, cut in enumerate(line.cuts)}
    num_microbatches = line.options.minibatch_size // plan.microbatch_size
    moves = _MOVES if line.options.replicas else _CUT_MOVES
    kinds, weights = [move for move, _ in moves], [weight for _, weight in moves]
    while True:
        draft = _Draft(
            cuts=[index[cut] for cut in plan.cuts],
            counts=list(plan.counts),
            num_devices=len(line.cluster.devices),
            num_microbatches=num_microbatches,
            devices_before=_devices_before(line, plan.microbatch_size),
        )
        for move in random.choices(kinds, weights, k=random.choice(NUM_MOVES)):
            move(draft, random)
        if draft.is_plan:
            yield LinePlan(
                cuts=tuple(line.cuts[boundary] for boundary in draft.cuts),
                counts=tuple(draft.counts),
                schedule=plan.schedule,
                microbatch_size=plan.microbatch_size,
            )


def climb(
    line: DeviceLine, plan: LinePlan, score: Score, num_tries: int, may_go_on: Callable[[], bool], seed: int = 0
) -> LinePlan:
    """Returns the best of a row of plans, none of which has a score much higher than the one before it.

    Args:
        num_tries: ends it after so many neighbours without a lower score than any before.
    """
    random, score_ns, num_worse, threshold = Random(seed), score(plan, inf), 0, FIRST_THRESHOLD
    best, best_ns = plan, score_ns
    source = neighbours(line, plan, random)
    while num_worse < num_tries and may_go_on():
        other, highest_ns = next(source), score_ns * (1 + threshold)
        other_ns = score(other, highest_ns)
        num_worse, threshold = num_worse + 1, threshold * 0.5 ** (1 / HALVED_AFTER)
        if other_ns <= highest_ns and line.allows(other):
            plan, score_ns = other, other_ns
            source = neighbours(line, plan, random)
            if score_ns < best_ns:
                best, best_ns, num_worse = plan, score_ns, 0
    return best


@lru_cache(maxsize=8)
def _devices_before(line: DeviceLine, size: int) -> tuple[float, ...]:
    """The devices that the layers before each boundary are worth. [boundaries]"""
    profile = line.profiles[line.cluster.devices[0].kind]
    work = prefix_sums([m.forward_ns + m.whole_backward_ns for m in profile.at(size)])[line.cuts]
    return tuple((work * (len(line.cluster.devices) / max(1, int(work[-1])))).tolist())


Move = Callable[[_Draft, Random], None]


def _shift_cuts(draft: _Draft, random: Random) -> None:
    """Moves one cut, or all from one to another, by a few boundaries."""
    stages = range(1, len(draft.counts))
    if not stages:
        return
    first = random.choice(stages)
    last = first if random.random() < 0.6 else random.choice(stages)
    by = random.choice(CUT_STEPS) * random.choice((-1, 1))
    by *= random.choice((1, max(1, draft.last_boundary // MANY_BOUNDARIES)))
    for s in range(min(first, last), max(first, last) + 1):
        draft.cuts[s] += by


def _shift_with_devices(draft: _Draft, random: Random) -> None:
    """The same, with the devices that these layers are worth, rounded up or down at random."""
    before = list(draft.cuts)
    _shift_cuts(draft, random)
    for s, (old, new) in enumerate(zip(before, draft.cuts, strict=True)):
        if old != new and min(old, new) >= 0 and max(old, new) <= draft.last_boundary:
            num = floor(draft.devices_before[new] - draft.devices_before[old] + random.random())
            draft.counts[s - 1] += num
            draft.counts[s] -= num


def _move_devices(draft: _Draft, random: Random) -> None:
    """Moves some devices from one stage to another, idle ones first in half of the cases."""
    source, target = (random.randrange(len(draft.counts)) for _ in range(2))
    num = random.choice(DEVICE_STEPS)
    draft.counts[target] += num
    draft.counts[source] -= max(0, num - draft.num_idle) if random.random() < 0.5 else num


def _move_round(draft: _Draft, random: Random) -> None:
    """Gives a stage as many devices as it takes for one micro-batch less on each, from idle ones and another stage."""
    source, target = (random.randrange(len(draft.counts)) for _ in range(2))
    num_each = draft.enough(draft.counts[target])
    if num_each > 1 and source != target:
        draft.counts[target] = draft.enough(num_each - 1)
        draft.counts[source] += min(0, draft.num_idle)


def _spare_devices(draft: _Draft, random: Random) -> None:
    """Leaves a stage the fewest devices with as many micro-batches each."""
    s = random.randrange(len(draft.counts))
    draft.counts[s] = draft.enough(draft.enough(draft.counts[s]))


def _split(draft: _Draft, random: Random) -> None:
    s = random.randrange(len(draft.counts))
    if draft.cuts[s + 1] - draft.cuts[s] > 1 and draft.counts[s] > 1:
        num = random.randrange(1, draft.counts[s])
        draft.counts[s : s + 1] = [num, draft.counts[s] - num]
        draft.cuts.insert(s + 1, random.randrange(draft.cuts[s] + 1, draft.cuts[s + 1]))


def _merge(draft: _Draft, random: Random) -> None:
    if len(draft.counts) > 1:
        s = random.randrange(len(draft.counts) - 1)
        draft.counts[s : s + 2] = [sum(draft.counts[s : s + 2])]
        del draft.cuts[s + 1]


_CUT_MOVES: tuple[tuple[Move, int], ...] = ((_shift_cuts, 10),)
_MOVES = (
    *_CUT_MOVES,
    (_shift_with_devices, 6),
    (_move_devices, 3),
    (_move_round, 4),
    (_spare_devices, 1),
    (_split, 1),
    (_merge, 1),
)
