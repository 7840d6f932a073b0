"""Searches the cuts of problems in which the choice of devices fixes the placements.

That is so if the schedule has several stages on each device: then each root of a problem is one pipeline. The search
first simulates the naive cuts of some pipelines. Then it alternates between two kinds of work. For the bound, it takes
the pipeline with the smallest bound, improves its naive cuts by local search, and raises its bound by a few rounds of
its game. For plans, it improves the cuts of the best pipelines by random moves; a climb that ends is followed by
another one, from cuts a little different from the best. All work is counted, so that the result does not depend on the
speed of the machine.
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
from bapipe.planner.fixed_placements.placed_pipeline import PlacedPipeline
from bapipe.planner.fixed_placements.random_moves import Climb, continue_climb, neighbours
from bapipe.planner.stages.equal_replicas import halves
from bapipe.planner.stages.intervals import INF, MAX_TIME
from bapipe.planner.stages.placements import StagePlacement
from bapipe.progress import SearchProgress

ROUNDS_PER_TURN = 5
"""Maximum number of rounds in which a bound is raised before the smallest bound is looked for again."""

NUM_CLIMBED = 3
"""The number of pipelines whose cuts are improved by random moves."""

MAX_DESCENDED = 240
"""Maximum number of boundaries with which local search improves naive cuts; its moves are small for longer chains."""

PROMISING = 1.1
"""The cuts of a pipeline are improved if their step is at most this factor times the best one."""


DESCENT_PART = 8
"""One local search has at most so large a part of the budget that is left."""

STEPS_PER_ACTION = 1_000
"""How many limits of a device's work, in questions about all of them, take as long as one simulated action."""


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
    """Returns the problems with raised bounds of their roots, and the best layout found, None without one.

    Args:
        problems: problems for which `has_fixed_placements` is true.
        max_actions: the budget, in simulated actions.
        deadline: ends the search with the best layout so far.
        incumbent: a layout to begin with, which may be of another problem.
    """
    search = _Search(problems, Budget(max_actions, deadline), progress)
    with suppress(OutOfTime):  # raised while a pipeline's tables are made
        if incumbent is not None:
            search.begin_with(incumbent)
        search.run()
    return search.raised_problems(), search.result()


@dataclass(slots=True, eq=False)
class _RootState:
    """A root and what is known of its pipeline.

    Attributes:
        bound_ns: a lower bound on the step of all its cuts.
        game: the game that raises the bound; None before the pipeline's first turn.
        best_ns, best_cuts: the best step time and its cuts; `INF` and () before any that fit are known.
        balanced: cuts that give all devices about as much to do; () without any, None as long as `bound_ns` may be less
            than what the least work of the devices says.
        climb: its current climb; None before the first one.
    """

    problem: Problem
    root: Root
    bound_ns: int
    balanced: Cuts | None = None
    game: PathBound | None = None
    best_ns: int = INF
    best_cuts: Cuts = ()
    climb: Climb | None = None


@dataclass(slots=True, eq=False)
class _DeviceOrders:
    """The roots with the same devices in different orders, which share a bound before each gets its own.

    Attributes:
        entries: a root for each order.
        paths: the paths found in any of their games; they are paths of all orders, which have the same schedule.
        bound_ns: a lower bound on the step of all orders.
        game: the game that raises this bound; None before its first turn.
    """

    entries: list[_RootState]
    paths: Paths
    bound_ns: int
    game: PathBound | None = None

    def bound_of(self, entry: _RootState) -> int:
        """Returns a lower bound on the step of all plans of one root."""
        return max(entry.bound_ns, self.bound_ns)


class _Search:
    """The state of a search.

    Attributes:
        orders: the roots, by problem and number of devices of each class.
        best_ns: the best step time so far; `INF` without one.
        num_simulated: how many cuts have been simulated.
    """

    def __init__(self, problems: Sequence[Problem], budget: Budget, progress: SearchProgress | None) -> None:
        self.problems, self.budget, self.progress = problems, budget, progress
        self.orders: dict[Hashable, _DeviceOrders] = {}
        for number, problem in enumerate(problems):
            for root in problem.roots:
                of_devices = self.orders.setdefault((number, root.num_of_class), _DeviceOrders([], {}, root.bound_ns))
                of_devices.entries.append(_RootState(problem, root, root.bound_ns))
        self.best_ns = INF
        self._incumbent: SearchResult | None = None
        self.num_simulated = 0
        self._started: list[_RootState] = []
        self._is_smallest_final = False
        self._random = np.random.default_rng(0)
        self._num_pushed = 0
        # (bound, sequence number, orders of the same devices, one of these; None for all of them together)
        self._queue: list[tuple[int, int, _DeviceOrders, _RootState | None]] = []
        for orders in self.orders.values():
            self._push(orders, None if len(orders.entries) > 1 else orders.entries[0])

    @property
    def entries(self) -> list[_RootState]:
        """All roots of all problems."""
        return [entry for orders in self.orders.values() for entry in orders.entries]

    def begin_with(self, incumbent: SearchResult) -> None:
        """Starts with a layout as the best so far, and improves its cuts if it is of one of the problems."""
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
        """Alternates between raising bounds and improving cuts, with about equal work for both."""
        self._start_naive()
        raising = climbing = 0
        while not self._is_over() and (self._can_raise() or self._to_climb()):
            before = self.budget.spent
            if self._can_raise() and (raising <= climbing or not self._to_climb()):
                self._raise_smallest()
                raising += self.budget.spent - before
            else:
                self._climb()
                climbing += self.budget.spent - before
            if self.progress and self.best_ns < INF:
                self.progress(self.num_simulated, self.best_ns, min(self.best_ns, self.bound_ns))

    def _start_naive(self) -> None:
        """Starts one pipeline on all devices, one on half of them, and so on, the smallest bounds first."""
        first: dict[tuple[Problem, int], tuple[int, _DeviceOrders]] = {}
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
        """Returns whether the search must end. If no known plan fits, only the deadline ends it."""
        return self.budget.is_over() if self.best_ns < INF else self.budget.is_out_of_time

    def _can_raise(self) -> bool:
        """Returns whether another turn may raise the smallest of all bounds."""
        return not self._is_smallest_final and bool(self._queue) and self._queue[0][0] < self.best_ns

    def _push(self, orders: _DeviceOrders, entry: _RootState | None) -> None:
        """Puts a root, or if None all orders of the same devices together, into the queue."""
        self._num_pushed += 1
        heappush(self._queue, (orders.bound_ns if entry is None else entry.bound_ns, self._num_pushed, orders, entry))

    def _raise_smallest(self) -> None:
        """Gives a turn to the entry of the queue with the smallest bound."""
        _, _, orders, entry = heappop(self._queue)
        is_solved = self._raise_for_all(orders) if entry is None else self._raise(orders, entry)
        if not is_solved:
            self._push(orders, entry)
        elif entry is None:  # the bound of all orders together no longer rises, so each order gets its own
            for each in orders.entries:
                each.bound_ns = max(each.bound_ns, orders.bound_ns)
                self._push(orders, each)
        # A bound that no longer rises may be the smallest of all: then the bound of the search cannot rise, either.
        elif entry.best_cuts and entry.bound_ns < self.best_ns:
            self._is_smallest_final = True
            self._start_others()

    def _start_others(self) -> None:
        """Starts one order of all devices that have not had a turn, because their plans may be better."""
        for orders in self.orders.values():
            if self.budget.is_over():
                return
            first = orders.entries[0]
            if first.game is None and orders.bound_of(first) < self.best_ns:
                self._start(orders, first)

    def _raise_for_all(self, orders: _DeviceOrders) -> bool:
        """Raises the bound of all orders of some devices; returns whether it no longer rises."""
        if any(entry.balanced is None for entry in orders.entries):
            for entry in orders.entries:
                if entry.balanced is None:
                    self._balance(entry)
            orders.bound_ns = max(orders.bound_ns, min(entry.bound_ns for entry in orders.entries))
            return False
        first = min(orders.entries, key=lambda entry: entry.bound_ns)
        if first.game is None:
            self._start(orders, first)  # to know some paths and a step time
            return False
        if orders.game is None:
            pipeline = PlacedPipeline(first.problem, _pipeline_of(first.root), in_any_order=True)
            self.budget.spend(pipeline.num_actions)
            orders.game = PathBound(pipeline, orders.paths)
            for cuts in naive_cuts(first.problem, pipeline.placements):
                orders.game.add_cuts(cuts)
        self._play(orders.game)
        orders.bound_ns = max(orders.bound_ns, orders.game.bound_ns)
        return orders.game.is_solved

    def _balance(self, entry: _RootState, *, is_started: bool = False) -> None:
        """Raises the bound of one root by what its devices have to do, and notes cuts that share it well.

        If it `is_started`, by all that is known of that; else at most up to the smallest bound for which that is done.
        """
        from bapipe.planner.fixed_placements.device_loads import DeviceLoads  # loads the compiler

        loads = DeviceLoads(entry.problem, _pipeline_of(entry.root), knows_order=is_started)
        best_ns = enough_ns = min(self.best_ns, MAX_TIME)
        if not is_started:
            done = (other.bound_ns for other in self.entries if other.balanced is not None)
            enough_ns = min((bound_ns for bound_ns in done if bound_ns > entry.bound_ns), default=best_ns)
        entry.bound_ns, balanced = loads.least(entry.bound_ns, min(best_ns, enough_ns))
        if balanced or enough_ns >= best_ns:
            entry.balanced = balanced
        self.budget.spend(loads.num_steps // STEPS_PER_ACTION)

    def _raise(self, orders: _DeviceOrders, entry: _RootState) -> bool:
        """Raises the bound of one root; returns whether it no longer rises."""
        if entry.balanced is None:
            self._balance(entry)
            return False
        if entry.game is None:
            self._start(orders, entry)
            return False
        self._play(entry.game)
        entry.bound_ns = max(entry.bound_ns, entry.game.bound_ns)
        return entry.game.is_solved

    def _play(self, game: PathBound) -> None:
        """Plays at most `ROUNDS_PER_TURN` rounds of a game, as long as its bound is the smallest of all."""
        if self.best_ns < INF:
            game.pipeline.forbid_slow(self.best_ns)
        enough_ns = min(self.best_ns, self._queue[0][0] + 1 if self._queue else INF)
        for _ in range(ROUNDS_PER_TURN):
            self.budget.spend(game.play_round())
            if game.is_solved or game.bound_ns >= enough_ns or self.budget.is_out_of_time:
                return

    def _start(self, orders: _DeviceOrders, entry: _RootState) -> None:
        """Starts the game of a pipeline, simulates its naive cuts, and improves the best by local search."""
        pipeline = PlacedPipeline(entry.problem, _pipeline_of(entry.root))
        self.budget.spend(pipeline.num_actions)
        entry.game = PathBound(pipeline, orders.paths)
        self._started.append(entry)
        self._balance(entry, is_started=True)
        starts = [*naive_cuts(entry.problem, pipeline.placements), *filter(None, [entry.balanced])]
        weights = entry.game.add_cuts(starts[0])
        for cuts in starts:
            self._try(entry, cuts)
        if not entry.best_cuts:
            pipeline.forbid_slow(self.best_ns)
            feasible = pipeline.min_cuts(weights)
            if feasible is None:
                entry.bound_ns = INF
                return
            self._try(entry, feasible[1])
        is_short = pipeline.intervals.num_boundaries <= MAX_DESCENDED
        if is_short and entry.best_cuts and entry.best_ns <= PROMISING * self.best_ns:
            self._descend(entry, entry.best_cuts, entry.best_ns)

    def _try(self, entry: _RootState, cuts: Cuts) -> int | None:
        """Simulates cuts, and keeps the best; returns their step time, None if they do not fit."""
        assert entry.game is not None
        step_ns = entry.game.pipeline.step_ns(cuts)
        self.budget.spend(entry.game.pipeline.simulation_cost)
        self.num_simulated += 1
        if step_ns is not None:
            entry.game.add_cuts(cuts)
            self._keep(entry, cuts, step_ns)
        return step_ns

    def _keep(self, entry: _RootState, cuts: Cuts, step_ns: int) -> None:
        """Keeps cuts if they are the best of their pipeline."""
        if step_ns < entry.best_ns:
            entry.best_ns, entry.best_cuts = step_ns, cuts
        self.best_ns = min(self.best_ns, step_ns)

    def _descend(self, entry: _RootState, cuts: Cuts, step_ns: int) -> None:
        """Improves cuts by local search, and keeps the result."""
        assert entry.game is not None
        budget = self.budget.part(DESCENT_PART)
        step_ns, cuts = descend(entry.game, cuts, step_ns, budget)
        self.budget.spend(budget.spent)
        self._keep(entry, cuts, step_ns)

    def _to_climb(self) -> list[_RootState]:
        """Returns those of the pipelines with the best cuts that may have better ones."""
        ranked = sorted((entry for entry in self._started if entry.best_cuts), key=lambda entry: entry.best_ns)
        return [
            entry
            for entry in ranked[:NUM_CLIMBED]
            if entry.bound_ns < self.best_ns and entry.best_ns <= PROMISING * self.best_ns
        ]

    def _climb(self) -> None:
        """Gives each of the best pipelines a turn of its climb; if that is over, starts another one."""
        for entry in self._to_climb():
            assert entry.game is not None
            if entry.climb is None:
                entry.climb = Climb(entry.best_cuts, entry.best_ns)
            elif entry.climb.is_over:
                entry.climb = self._next_climb(entry, entry.game.pipeline)
            continue_climb(
                entry.climb,
                entry.game.pipeline,
                simulated_ns=partial(self._try, entry),
                budget=self.budget,
                random=self._random,
            )

    def _next_climb(self, entry: _RootState, pipeline: PlacedPipeline) -> Climb:
        """Returns a climb from a random neighbour of the best cuts."""
        for other in neighbours(pipeline, entry.best_cuts, self._random)[:1].tolist():
            return Climb(tuple(other), self._try(entry, tuple(other)) or INF)
        return Climb(entry.best_cuts, entry.best_ns)

    @property
    def bound_ns(self) -> int:
        """A lower bound on the step of all layouts of all problems."""
        return min((orders.bound_of(entry) for orders in self.orders.values() for entry in orders.entries), default=INF)

    def raised_problems(self) -> tuple[Problem, ...]:
        """Returns the problems with the bounds that were found for their roots, none above the best step."""
        roots: dict[Problem, list[Root]] = {problem: [] for problem in self.problems}
        for orders in self.orders.values():
            for entry in orders.entries:
                raised = replace(entry.root, bound_ns=min(orders.bound_of(entry), self.best_ns))
                roots[entry.problem].append(raised)
        return tuple(problem.with_roots(roots[problem]) for problem in self.problems)

    def result(self) -> SearchResult | None:
        """Returns the best layout with the bound proven; None if no layout that fits is known."""
        best = min((entry for entry in self._started if entry.best_cuts), key=lambda entry: entry.best_ns, default=None)
        if self._incumbent is not None and (best is None or best.best_ns >= self._incumbent.step_ns):
            return replace(self._incumbent, lower_bound_ns=min(self.best_ns, self.bound_ns))
        if best is None:
            return None
        assert best.game is not None
        return SearchResult(
            problem=best.problem,
            layout=best.game.pipeline.layout(best.best_cuts),
            step_ns=best.best_ns,
            lower_bound_ns=min(best.best_ns, self.bound_ns),
        )


def _pipeline_of(root: Root) -> tuple[StagePlacement, ...]:
    """Returns the pipeline of a root whose placements have one successor each."""
    path = [root.first_placements[0]]
    while path[-1].successors:
        path.append(path[-1].successors[0])
    return tuple(path)
