"""Whether a step can be so short: a relaxation of the pipelines over a long chain that is quick to decide.

For a limit, a slot may hold the runs of layers in its windows. So the least time of one micro-batch from a place down
to the end and back, its path, is a minimum over a window of ends: one dynamic programme over slots, last to first. A
path must be in time

  for as many rounds as the schedule's depth asks for;
  beside all micro-batches on the busiest link;
  and with the work of a device that cannot begin before its first micro-batch is back: all its other backwards, and
  the F that it may not have run before.

A limit that leaves no path from the start of the chain is below every plan. The cost is that of slots x (slots that
follow + log places) x places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.branch_and_bound.intervals import INF, IntArray
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.long_chain.feasible_intervals import BottleneckReplica, FeasibleIntervals

Path = tuple[tuple[int, ...], tuple[StagePlacement, ...]]
"""The places where stages begin and end, and their slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedStage:
    """A slot with what does not depend on the limit.

    Attributes:
        times: F and backward of one micro-batch, summed over the layers before each place.
        plain, again: for each place the last end of a run that fits, without and with recomputation.
        hops: to the slots that can come next.
        rounds: micro-batches that go to the last stage and back one after another.
    """

    slot: StagePlacement
    times: IntArray
    turn: BottleneckReplica
    plain: IntArray
    again: IntArray
    hops: tuple["Transition", ...]
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Transfers from a slot to some of the next ones.

    Attributes:
        nodes: the numbers of their nodes.
        way: both transfers of one micro-batch at every place, the same for all of them.
        busy: how long the busiest link takes for all micro-batches, and one more the other way, at least.
    """

    nodes: IntArray
    way: IntArray
    busy: IntArray


class Relaxation:
    """The relaxation of a problem, for the pipelines that begin with some slots and go on as `follow` says."""

    def __init__(
        self,
        problem: Problem,
        windows: FeasibleIntervals,
        first: Sequence[StagePlacement],
        follow: Callable[[StagePlacement], Sequence[StagePlacement]],
    ) -> None:
        self.problem, self.windows, self._follow = problem, windows, follow
        self.last = problem.bounds.pieces.grid.num_places - 1
        self._number: dict[int, int] = {}
        self._nodes: list[RelaxedStage] = []
        for slot in first:
            self._add(slot)
        self._first = sorted({self._number[id(slot)] for slot in first})
        shape = len(self._nodes), self.last + 1
        self._paths, self._reach = np.full(shape, INF), np.full(shape, INF)
        self._ends = np.zeros(shape, dtype=np.int64)

    @property
    def num_runs(self) -> int:
        """Runs of layers times slots."""
        return len(self._nodes) * self.last * self.last

    def _add(self, slot: StagePlacement) -> None:
        """Adds a slot after all those that can follow it."""
        stack = [slot]
        while stack:
            missing = [other for other in self._follow(stack[-1]) if id(other) not in self._number]
            if missing:
                stack += missing
                continue
            top = stack.pop()
            if id(top) not in self._number:
                self._number[id(top)] = len(self._nodes)
                self._nodes.append(self._node(top))

    def _node(self, slot: StagePlacement) -> RelaxedStage:
        found: dict[bytes, list[tuple[int, IntArray, IntArray]]] = {}
        for other in self._follow(slot):
            way, busy = self.windows.transfers(self.problem.bounds, slot, other)
            found.setdefault(way.tobytes(), []).append((self._number[id(other)], way, busy))
        hops = [
            Transition(
                nodes=np.array([number for number, _, _ in own]),
                way=own[0][1],
                busy=np.minimum.reduce([busy for _, _, busy in own]),
            )
            for own in found.values()
        ]
        plain, again = self.windows.fitting(slot)
        return RelaxedStage(
            slot=slot,
            times=self.windows.times(slot),
            turn=self.windows.turn(slot, self.problem.bounds),
            plain=plain,
            again=again,
            hops=tuple(hops),
            rounds=(self.problem.num_microbatches - 1) // slot.turns.depth + 1,
        )

    def is_feasible(self, limit_ns: int) -> bool:
        """Returns whether the relaxation has a pipeline that takes no longer."""
        for k, node in enumerate(self._nodes):
            self._solve(k, node, self._within(node, limit_ns), limit_ns)
        return bool(self._paths[self._first, 0].min() < INF)

    def is_balanced(self, microbatch_ns: int) -> bool:
        """Returns whether every stage can take no longer for a micro-batch, whatever the step then takes."""
        for k, node in enumerate(self._nodes):
            end = np.searchsorted(node.times, node.times + microbatch_ns, side="right") - 1
            self._solve(k, node, np.minimum(end, node.again), INF >> 1)
        return bool(self._paths[self._first, 0].min() < INF)

    def _within(self, node: RelaxedStage, limit_ns: int) -> IntArray:
        plain, again = self.windows.ends(self.windows.limits(node.slot), limit_ns)
        end: IntArray = np.maximum(np.minimum(plain, node.plain), np.minimum(again, node.again))
        return end

    def _solve(self, k: int, node: RelaxedStage, end: IntArray, limit_ns: int) -> None:
        before = self.windows.before
        reach = np.full(self.last + 1, INF)
        if node.slot.last:
            reach[-1] = 0
        for hop in node.hops:
            path = self._paths[hop.nodes].min(axis=0)
            in_time = path + hop.busy + before <= limit_ns
            reach = np.minimum(reach, np.where(in_time, path + hop.way, INF))
        self._reach[k] = reach
        around = np.minimum(reach + node.times, INF)
        after = node.turn.beside
        soon = np.searchsorted(after, limit_ns - around.min() - before + node.times + after, side="right") - 1
        end = np.minimum(end, soon)
        self._ends[k] = end
        path = range_min(around, end) - node.times
        path[path > INF >> 1] = INF
        path[before + node.rounds * np.minimum(path, INF // node.rounds) > limit_ns] = INF
        path[-1] = INF
        self._paths[k] = path

    def best_path(self) -> Path | None:
        """Returns the shortest path of the windows last looked at; None where a stage of it does not fit after all."""
        k = min(self._first, key=lambda k: int(self._paths[k][0]))
        places, slots = [0], []
        while True:
            node, i = self._nodes[k], places[-1]
            fits = self.problem.bounds.pieces.row(node.slot, i).fits
            ends = np.arange(i + 1, int(self._ends[k][i]) + 1)
            ends = ends[fits[: len(ends)]]
            costs = node.times[ends] + self._reach[k][ends]
            if len(ends) == 0 or costs.min() >= INF:
                return None
            j = int(ends[np.argmin(costs)])
            places.append(j)
            slots.append(node.slot)
            if node.slot.last:
                return tuple(places), tuple(slots)
            k = min((int(self._paths[n][j] + hop.way[j]), int(n)) for hop in node.hops for n in hop.nodes)[1]


def range_min(values: IntArray, end: IntArray) -> IntArray:
    """Returns for every i the least of values[i+1..end[i]], `INF` where there is none. O(n log n)."""
    size = len(values)
    rows = [values]
    width = 1
    while 2 * width < size:  # each row has the least of as many values from each place on as twice the one before
        row = rows[-1].copy()
        np.minimum(row[: size - width], rows[-1][width:], out=row[: size - width])
        rows.append(row)
        width *= 2
    begin = np.arange(1, size + 1)
    count = end - begin + 1
    level = np.frexp(np.maximum(count, 1).astype(float))[1] - 1
    table = np.stack(rows)
    first = table[level, np.minimum(begin, size - 1)]
    second = table[level, np.maximum(end - (1 << level) + 1, 0)]
    found: IntArray = np.where(count > 0, np.minimum(first, second), INF)
    return found
