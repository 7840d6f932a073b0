"""Searches the cuts of the problems in which the choice of devices fixes the placements.

That is so where a schedule gives devices several stages: each root of such a problem is one pipeline. First of all the
naive cuts of some pipelines are simulated. Then the pipeline with the smallest bound is always the next: its naive cuts
are improved by local search, and its bound is raised, some rounds at a time. By turns with that, the cuts of the best
pipelines are improved by random moves, again and again from their best cuts a little changed. All work is counted, so
that the result does not depend on the speed of the machine.
"""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush

import numpy as np

from bapipe.planner.branch_and_bound.problem import Problem, Root, SearchResult
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.fixed_placements.budget import Budget
from bapipe.planner.fixed_placements.local_search import descend
from bapipe.planner.fixed_placements.naive_cuts import Cuts, naive_cuts
from bapipe.planner.fixed_placements.path_bound import PathBound, Paths
from bapipe.planner.fixed_placements.pipeline import Pipeline
from bapipe.planner.fixed_placements.random_moves import Climb, go_on, neighbours
from bapipe.planner.stages.equal_groups import halves
from bapipe.planner.stages.intervals import INF
from bapipe.planner.stages.placements import StagePlacement
from bapipe.progress import SearchProgress

ROUNDS_PER_TURN = 5
"""Maximum number of rounds in which a bound is raised before the smallest bound is chosen anew."""

NUM_CLIMBED = 3
"""The number of pipelines whose cuts are improved."""

MAX_DESCENDED = 240
"""Maximum number of boundaries with which local search begins with small moves of cuts; for longer chains these are too
small to begin with."""

PROMISING = 1.1
"""The cuts of a pipeline are improved if they exceed the best step by no more than this factor."""


def has_fixed_placements(problem: Problem) -> bool:
    """Returns whether every root of a problem is one pipeline."""
    return all(root.num_positions > 0 for root in problem.roots)


def search_fixed_placements(
    problems: Sequence[Problem],
    *,
    max_actions: int,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
    incumbent: SearchResult | None = None,
) -> tuple[tuple[Problem, ...], SearchResult | None]:
    """Returns the problems with the bounds of their roots raised, and the best layout found, None if nothing fits.

    Args:
        problems: those that `has_fixed_placements` accepts.
        max_actions: the budget, in simulated actions, and other work at the rates of `budget.py`.
        deadline: ends the search with the best layout so far.
        incumbent: a layout to begin with, maybe of another problem.
    """
    search = _Search(problems, Budget(max_actions, deadline), progress)
    with suppress(OutOfTime):  # of the tables of a pipeline
        if incumbent is not None:
            search.begin_with(incumbent)
        search.run()
    return search.raised_problems(), search.result()


@dataclass(slots=True, eq=False)
class _Entry:
    """A root and what is known of its pipeline.

    Attributes:
        game: None before its first turn.
        best_ns, best: the best cuts, `INF` and () without any.
        climb: where its climb is; None before its first turn.
    """

    problem: Problem
    root: Root
    bound_ns: int
    game: PathBound | None = None
    best_ns: int = INF
    best: Cuts = ()
    climb: Climb | None = None


@dataclass(slots=True, eq=False)
class _Orders:
    """Roots with the same devices in different orders, which first have one bound for all.

    Attributes:
        game: None before its first turn.
        paths: the paths found in any of their games: all have the same schedule.
    """

    entries: list[_Entry]
    paths: Paths
    bound_ns: int
    game: PathBound | None = None

    def bound_of(self, entry: _Entry) -> int:
        """Returns a lower bound of all plans of one root."""
        return max(entry.bound_ns, self.bound_ns)


class _Search:
    def __init__(self, problems: Sequence[Problem], budget: Budget, progress: SearchProgress | None) -> None:
        self.problems, self.budget, self.progress = problems, budget, progress
        self.orders: dict[Hashable, _Orders] = {}
        for number, problem in enumerate(problems):
            for root in problem.roots:
                of_devices = self.orders.setdefault((number, root.num_of_class), _Orders([], {}, root.bound_ns))
                of_devices.entries.append(_Entry(problem, root, root.bound_ns))
        self.best_ns = INF
        self._incumbent: SearchResult | None = None
        self.num_simulated = 0
        self._started: list[_Entry] = []
        self._is_smallest_final = False
        self._random = np.random.default_rng(0)
        self._num_pushed = 0
        # (bound, sequence number, devices, the root or all orders)
        self._queue: list[tuple[int, int, _Orders, _Entry | None]] = []
        for orders in self.orders.values():
            self._push(orders, None if len(orders.entries) > 1 else orders.entries[0])

    @property
    def entries(self) -> list[_Entry]:
        """All roots."""
        return [entry for orders in self.orders.values() for entry in orders.entries]

    def begin_with(self, incumbent: SearchResult) -> None:
        """Takes a layout as the best so far, and improves its cuts if it is of one of the problems."""
        self._incumbent, self.best_ns = incumbent, incumbent.step_ns
        placements, problem = incumbent.layout.placements, incumbent.problem
        for orders in self.orders.values():
            for entry in orders.entries:
                if entry.problem is problem and placements[0] in entry.root.first_placements:
                    self._start(orders, entry)
                    boundaries = tuple(problem.cuts.index(cut) for cut in incumbent.layout.cuts)
                    self._try(entry, boundaries)
                    self._descend(entry, boundaries, incumbent.step_ns)

    def run(self) -> None:
        """Raises bounds and improves cuts by turns, with as much work for the one as for the other."""
        self._start_naive()
        raising = climbing = 0
        while not self._is_over() and (self._can_raise() or self._climbing()):
            before = self.budget.spent
            if self._can_raise() and (raising <= climbing or not self._climbing()):
                self._raise_smallest()
                raising += self.budget.spent - before
            else:
                self._climb()
                climbing += self.budget.spent - before
            if self.progress and self.best_ns < INF:
                self.progress(self.num_simulated, self.best_ns, min(self.best_ns, self.bound_ns))

    def _start_naive(self) -> None:
        """Begins with some devices of each number: all, half of them and so on, the smallest bounds first."""
        first: dict[tuple[Problem, int], tuple[int, _Orders]] = {}
        for orders in self.orders.values():
            root = orders.entries[0].root
            key = orders.entries[0].problem, root.num_devices
            if root.num_devices in halves(max(r.num_devices for r in key[0].roots)):
                first[key] = min(first.get(key, (INF, orders)), (orders.bound_ns, orders), key=lambda each: each[0])
        for bound_ns, orders in sorted(first.values(), key=lambda each: each[0]):
            if bound_ns >= self.best_ns or self._is_over():
                break
            if orders.entries[0].game is None:
                self._start(orders, orders.entries[0])

    def _is_over(self) -> bool:
        """Whether the search ends; without a plan that fits only the deadline ends it."""
        return self.budget.is_over() if self.best_ns < INF else self.budget.is_out_of_time

    def _can_raise(self) -> bool:
        """Whether a turn may raise the smallest bound of all."""
        return not self._is_smallest_final and bool(self._queue) and self._queue[0][0] < self.best_ns

    def _push(self, orders: _Orders, entry: _Entry | None) -> None:
        self._num_pushed += 1
        heappush(self._queue, (orders.bound_ns if entry is None else entry.bound_ns, self._num_pushed, orders, entry))

    def _raise_smallest(self) -> None:
        """Gives the pipeline with the smallest bound a turn, or all orders of its devices together."""
        _, _, orders, entry = heappop(self._queue)
        is_solved = self._raise_for_all(orders) if entry is None else self._raise(orders, entry)
        if not is_solved:
            self._push(orders, entry)
        elif entry is None:  # the bound of all orders does not rise any more, so each gets its own
            for each in orders.entries:
                each.bound_ns = max(each.bound_ns, orders.bound_ns)
                self._push(orders, each)
        # A bound that does not rise any more may remain the smallest of all.
        elif entry.best and entry.bound_ns < self.best_ns:
            self._is_smallest_final = True
            self._start_others()

    def _start_others(self) -> None:
        """Begins with one order of any devices that have not had a turn: their plans may be better."""
        for orders in self.orders.values():
            if self.budget.is_over():
                return
            first = orders.entries[0]
            if first.game is None and orders.bound_of(first) < self.best_ns:
                self._start(orders, first)

    def _raise_for_all(self, orders: _Orders) -> bool:
        """Raises the bound of all orders of some devices; returns whether it does not rise any more."""
        first = orders.entries[0]
        if first.game is None:
            self._start(orders, first)  # for paths and a best step
            return False
        if orders.game is None:
            pipeline = Pipeline(first.problem, _path_of(first.root), in_any_order=True)
            self.budget.spend(pipeline.num_actions)
            orders.game = PathBound(pipeline, orders.paths)
            for cuts in naive_cuts(first.problem, pipeline.placements):
                orders.game.add_cuts(cuts)
        self._play(orders.game)
        orders.bound_ns = max(orders.bound_ns, orders.game.bound_ns)
        return orders.game.is_solved

    def _raise(self, orders: _Orders, entry: _Entry) -> bool:
        """Raises the bound of one root; returns whether it does not rise any more."""
        if entry.game is None:
            self._start(orders, entry)
            return False
        self._play(entry.game)
        entry.bound_ns = max(entry.bound_ns, entry.game.bound_ns)
        return entry.game.is_solved

    def _play(self, game: PathBound) -> None:
        """Some rounds of a game, as long as its bound is the smallest of all."""
        if self.best_ns < INF:
            game.pipeline.forbid_slow(self.best_ns)
        enough_ns = min(self.best_ns, self._queue[0][0] + 1 if self._queue else INF)
        for _ in range(ROUNDS_PER_TURN):
            self.budget.spend(game.improve())
            if game.is_solved or game.bound_ns >= enough_ns or self.budget.is_out_of_time:
                return

    def _start(self, orders: _Orders, entry: _Entry) -> None:
        """Simulates the naive cuts of a pipeline, improves the best of them, and begins its game."""
        pipeline = Pipeline(entry.problem, _path_of(entry.root))
        self.budget.spend(pipeline.num_actions)
        entry.game = PathBound(pipeline, orders.paths)
        self._started.append(entry)
        starts = list(naive_cuts(entry.problem, pipeline.placements))
        weights = entry.game.add_cuts(starts[0])
        for cuts in starts:
            self._try(entry, cuts)
        if not entry.best:
            pipeline.forbid_slow(self.best_ns)
            feasible = pipeline.min_cuts(weights)
            if feasible is None:
                entry.bound_ns = INF
                return
            self._try(entry, feasible[1])
        is_short = pipeline.intervals.num_boundaries <= MAX_DESCENDED
        if is_short and entry.best and entry.best_ns <= PROMISING * self.best_ns:
            self._descend(entry, entry.best, entry.best_ns)

    def _try(self, entry: _Entry, cuts: Cuts) -> int | None:
        """Simulates cuts; returns their step time, None if they do not fit."""
        assert entry.game is not None
        step_ns = entry.game.pipeline.step_ns(cuts)
        self.budget.spend(entry.game.pipeline.simulation_cost)
        self.num_simulated += 1
        if step_ns is not None:
            entry.game.add_cuts(cuts)
            self._keep(entry, cuts, step_ns)
        return step_ns

    def _keep(self, entry: _Entry, cuts: Cuts, step_ns: int) -> None:
        if step_ns < entry.best_ns:
            entry.best_ns, entry.best = step_ns, cuts
        self.best_ns = min(self.best_ns, step_ns)

    def _descend(self, entry: _Entry, cuts: Cuts, step_ns: int) -> None:
        assert entry.game is not None
        step_ns, cuts = descend(entry.game, cuts, step_ns, self.budget)
        self._keep(entry, cuts, step_ns)

    def _climbing(self) -> list[_Entry]:
        """The pipelines with the best cuts that may have better ones."""
        ranked = sorted((entry for entry in self._started if entry.best), key=lambda entry: entry.best_ns)
        return [
            entry
            for entry in ranked[:NUM_CLIMBED]
            if entry.bound_ns < self.best_ns and entry.best_ns <= PROMISING * self.best_ns
        ]

    def _climb(self) -> None:
        """Improves the cuts of the best pipelines: first their best ones, then those that random moves lead to."""
        for entry in self._climbing():
            assert entry.game is not None
            if entry.climb is None:
                entry.climb = Climb(entry.best, entry.best_ns)
            elif entry.climb.is_over:
                entry.climb = self._next_climb(entry, entry.game.pipeline)
            go_on(
                entry.climb,
                entry.game.pipeline,
                simulated_ns=partial(self._try, entry),
                budget=self.budget,
                random=self._random,
            )

    def _next_climb(self, entry: _Entry, pipeline: Pipeline) -> Climb:
        """A climb from a random neighbour of the best cuts."""
        for other in neighbours(pipeline, entry.best, self._random)[:1].tolist():
            return Climb(tuple(other), self._try(entry, tuple(other)) or INF)
        return Climb(entry.best, entry.best_ns)

    @property
    def bound_ns(self) -> int:
        """A time that no step of any problem beats."""
        return min((orders.bound_of(entry) for orders in self.orders.values() for entry in orders.entries), default=INF)

    def raised_problems(self) -> tuple[Problem, ...]:
        """Returns the problems with the bounds found."""
        roots: dict[Problem, list[Root]] = {problem: [] for problem in self.problems}
        for orders in self.orders.values():
            for entry in orders.entries:
                raised = replace(entry.root, bound_ns=min(orders.bound_of(entry), self.best_ns))
                roots[entry.problem].append(raised)
        return tuple(problem.with_roots(roots[problem]) for problem in self.problems)

    def result(self) -> SearchResult | None:
        best = min((entry for entry in self._started if entry.best), key=lambda entry: entry.best_ns, default=None)
        if self._incumbent is not None and (best is None or best.best_ns >= self._incumbent.step_ns):
            return replace(self._incumbent, lower_bound_ns=min(self.best_ns, self.bound_ns))
        if best is None:
            return None
        assert best.game is not None
        return SearchResult(
            problem=best.problem,
            layout=best.game.pipeline.layout(best.best),
            step_ns=best.best_ns,
            lower_bound_ns=min(best.best_ns, self.bound_ns),
        )


def _path_of(root: Root) -> tuple[StagePlacement, ...]:
    """The placements of a root whose placements have one successor each."""
    path = [root.first_placements[0]]
    while path[-1].successors:
        path.append(path[-1].successors[0])
    return tuple(path)
