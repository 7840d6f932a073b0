"""Exact search: completes partial plans in the order of a lower bound until the bound meets the best plan found."""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from bapipe.planner.branch_and_bound.intervals import INF, IntArray
from bapipe.planner.branch_and_bound.local_search import change_schedule, move_cut, move_device
from bapipe.planner.branch_and_bound.lower_bound import PartialPlan
from bapipe.planner.branch_and_bound.problem import Problem, Root, SearchResult
from bapipe.progress import SearchProgress

ACTIONS_PER_NODE = 1200
"""How many actions the judge runs in the time that one partial plan takes to open."""

EVENT_DRIVEN_FACTOR = 20
"""How many times longer the judge takes event by event."""

NODES_BETWEEN_DIVES = 20
"""Partial plans opened between two that are completed in the quickest way."""


def best_first(
    problems: Sequence[Problem],
    *,
    max_nodes: int = 20_000,
    stop: Callable[[], bool] = lambda: False,
    progress: SearchProgress | None = None,
    known: SearchResult | None = None,
) -> SearchResult | None:
    """Returns the fastest layout over all problems, None where nothing was found that fits.

    It begins with a layout that is known, if there is one.

    The bound never exceeds the judged time, so the first moment it reaches the best plan's time proves that plan
    optimal. After `max_nodes` partial plans, or when `stop` says so, the best one so far is returned with the bound
    reached; what the judge does counts as some partial plans too.
    """
    search = _Search(problems, progress)
    if known is not None:
        search.best, search.best_ns = known, known.step_ns
    while search.is_open and search.spent < max_nodes and not (search.best is not None and stop()):
        search.advance()
    return search.result()


class _Search:
    """The partial plans to open, and the best plan so far."""

    def __init__(self, problems: Sequence[Problem], progress: SearchProgress | None) -> None:
        self.problems, self.progress = problems, progress
        self.best: SearchResult | None = None
        self.best_ns = INF
        self.spent = self.judged = self.count = 0
        self.rested = 0
        self.queue: list[tuple[int, int, int, _Node]] = []
        for i, problem in enumerate(problems):
            for start in problem.starts:
                self.count += 1
                self.queue.append((start.least_ns, 0, self.count, _Node(i, start, None, None, 0)))
        heapify(self.queue)

    @property
    def is_open(self) -> bool:
        return bool(self.queue) and self.queue[0][0] < self.best_ns

    def result(self) -> SearchResult | None:
        if self.best is None:
            return None
        lower_ns = min(self.best_ns, self.queue[0][0]) if self.queue else self.best_ns
        return SearchResult(
            problem=self.best.problem, layout=self.best.layout, step_ns=self.best_ns, lower_bound_ns=int(lower_ns)
        )

    def advance(self) -> None:
        """Opens the partial plan of least bound."""
        bound_ns, _, _, item = heappop(self.queue)
        self.spent += 1
        if item.start is not None:
            self.begin(item.problem, item.start)
            return
        prefix = item.prefix
        assert prefix is not None
        if item.children is not None:
            self.push(item.problem, prefix, item.children, item.next)
            bounds = self.problems[item.problem].bounds
            place, number = item.children.pick(item.next - 1)
            prefix = bounds.extend(prefix, place, number)
        if prefix.whole:
            self.judge(self.problems[item.problem], prefix, bound_ns)
            return
        self.expand(item.problem, prefix)
        self.rested += 1
        if self.rested >= NODES_BETWEEN_DIVES:
            self.rested = 0
            self.dive(self.problems[item.problem], prefix, bound_ns)

    def begin(self, i: int, start: Root) -> None:
        problem = self.problems[i]
        ready = [(b, p) for b, p in problem.bounds.starts(start.first, start.num_places) if b < self.best_ns]
        for bound_ns, prefix in ready:
            self.count += 1
            heappush(self.queue, (bound_ns, 0, self.count, _Node(i, None, prefix, None, 0)))
        if ready and self.best is None:
            bound_ns, prefix = min(ready, key=lambda entry: entry[0])
            self.dive(problem, prefix, bound_ns)

    def expand(self, i: int, prefix: PartialPlan) -> None:
        children = Children(*self.problems[i].bounds.children(prefix), self.best_ns)
        self.push(i, prefix, children, 0)

    def push(self, i: int, prefix: PartialPlan, children: "Children", place: int) -> None:
        """Queues the next best of the longer prefixes; it brings the one after it along."""
        if place < len(children.bounds) and children.bounds[place] < self.best_ns:
            self.count += 1
            entry = (int(children.bounds[place]), -len(prefix.places), self.count)
            heappush(self.queue, (*entry, _Node(i, None, prefix, children, place + 1)))

    def dive(self, problem: Problem, prefix: PartialPlan, bound_ns: int) -> None:
        """Completes a prefix by always taking the stage of least bound, and judges it."""
        while not prefix.whole:
            bounds, places, numbers = problem.bounds.children(prefix)
            self.spent += 1
            best = int(np.argmin(bounds))
            if bounds[best] >= self.best_ns:
                return
            prefix = problem.bounds.extend(prefix, int(places[best]), int(numbers[best]))
        self.judge(problem, prefix, bound_ns)

    def judge(self, problem: Problem, prefix: PartialPlan, bound_ns: int) -> None:
        """Judges a plan; one that is the best so far is changed here and there as long as that makes it better."""
        better = (problem, prefix) if self.consider(problem, prefix) else None
        while better is not None and bound_ns < self.best_ns:
            better = self.improve(*better)
        if self.progress and self.best:
            self.progress(self.judged, self.best_ns, min(bound_ns, self.best_ns))

    def improve(self, problem: Problem, prefix: PartialPlan) -> tuple[Problem, PartialPlan] | None:
        """Returns the first plan like the best one that is better; None where there is none."""
        here = [problem]
        elsewhere = [other for other in self.problems if other is not problem]
        for like, problems in ((change_schedule, elsewhere), (move_cut, here), (move_device, here)):
            for own in problems:
                for other in like(own, prefix, self.best_ns):
                    self.spent += len(other.slots)
                    if self.consider(own, other):
                        return own, other
        return None

    def consider(self, problem: Problem, prefix: PartialPlan) -> bool:
        """Returns whether a plan fits and is the best so far."""
        layout = problem.layout(prefix.places, prefix.slots)
        num_actions = 3 * len(layout.slots) * problem.num_microbatches
        self.spent += num_actions * (1 if problem.is_fast(layout) else EVENT_DRIVEN_FACTOR) // ACTIONS_PER_NODE
        self.judged += 1
        if not problem.fits(layout):
            return False
        step_ns = problem.step_ns(layout)
        if self.best is not None and step_ns >= self.best_ns:
            return False
        self.best = SearchResult(problem=problem, layout=layout, step_ns=step_ns, lower_bound_ns=step_ns)
        self.best_ns = step_ns
        return True


class Children:
    """The longer prefixes of a prefix that can still beat the best plan, in the order of their bounds."""

    __slots__ = ("bounds", "numbers", "places")

    def __init__(self, bounds: IntArray, places: IntArray, numbers: IntArray, below_ns: int) -> None:
        chosen = np.flatnonzero(bounds < below_ns)
        chosen = chosen[np.argsort(bounds[chosen], kind="stable")]
        self.bounds, self.places, self.numbers = bounds[chosen], places[chosen], numbers[chosen]

    def pick(self, place: int) -> tuple[int, int]:
        """Returns the end and the number of the next slot of one of them."""
        return int(self.places[place]), int(self.numbers[place])


class _Node:
    """A part of the space: pipelines over some devices, a prefix, or what is left of a prefix's children."""

    __slots__ = ("children", "next", "prefix", "problem", "start")

    def __init__(
        self, problem: int, start: Root | None, prefix: PartialPlan | None, children: Children | None, following: int
    ) -> None:
        self.problem, self.start, self.prefix, self.children, self.next = problem, start, prefix, children, following
