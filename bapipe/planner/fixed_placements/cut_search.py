"""Branch and bound over the cuts of pipelines whose placements are fixed, with bounds from paths.

A node is a pipeline and a set of possible cuts (`possible_cuts.py`). Its bound is that of the game of cuts against
paths (`path_bound.py`), played on these cuts alone (`cut_game.py`). Each path and each mixture of paths also removes
the intervals that no cuts faster than the best step have. The node with the smallest bound is next; it is divided at
the cut whose position the mixed strategy of the cuts leaves most open. A node with few cuts is searched to its end:
the longest known path is a lower bound of each, and those below the best step are simulated.

The nearer the best step to the bound, the more intervals are removed. So the search asks first whether any cuts are
faster than a limit between the two. If no node of this limit is left, it is a bound, and the next limit is farther up;
else the next one is nearer to the bound.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from bapipe.planner.branch_and_bound.problem import Problem, Root, SearchResult
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.fixed_placements.budget import Budget
from bapipe.planner.fixed_placements.cut_game import (
    NUM_LAST_KEPT,
    CutGame,
    Simulated,
    is_exact,
    least_whole,
    sweep_cost,
)
from bapipe.planner.fixed_placements.local_search import PRODUCTS_PER_ACTION
from bapipe.planner.fixed_placements.naive_cuts import Cuts, naive_cuts
from bapipe.planner.fixed_placements.path_bound import Paths
from bapipe.planner.fixed_placements.pipeline import Pipeline
from bapipe.planner.fixed_placements.possible_cuts import PossibleCuts, all_cuts, minimize
from bapipe.planner.stages.intervals import INF, IntArray
from bapipe.planner.stages.placements import StagePlacement
from bapipe.progress import SearchProgress

MAX_PIPELINES = 64
"""Maximum number of pipelines of all problems together, for this search to take them, ..."""

MAX_ENTRIES = 20_000_000
"""... and of the entries of their tables: the times of all replicas with all intervals."""

MAX_ENUMERATED = 4_000
"""Maximum number of cuts of a node that is enumerated."""

FIRST_ACTIONS = 3_000_000
"""The budget of the first attempt, in simulated actions; it doubles with each that fails."""

MAX_FILTERS, MAX_FILTER_SUMS = 300, 3_000_000
"""Maximum number of known paths that remove intervals when a node is opened, and of the sums that this takes."""

MAX_FIRST_ROUNDS, MAX_ROUNDS = 30, 6
"""Rounds of the game of a pipeline's first node, and of the others."""

FIRST_SHARE = 1 / 4
"""How much of the gap between the bound and the best step lies below the first limit."""

MIN_GAP_DIVISOR = 1_000
"""If bound and best step differ by less than 1 / `MIN_GAP_DIVISOR` of the step, no limit is set between them."""

MIN_RISE, MAX_STALLED = 1.002, 2
"""A round that raises the bound of a node by less than this factor is stalled; this many of them end its game."""


def few_pipelines(problems: Sequence[Problem]) -> tuple[tuple[Problem, Root, tuple[StagePlacement, ...]], ...]:
    """Returns every pipeline of some problems, () if they are too many or too large, or not known in time."""
    with suppress(OutOfTime):  # a caller may know a plan by then
        return _few_pipelines(problems)
    return ()


def _few_pipelines(problems: Sequence[Problem]) -> tuple[tuple[Problem, Root, tuple[StagePlacement, ...]], ...]:
    found: list[tuple[Problem, Root, tuple[StagePlacement, ...]]] = []
    num_entries = 0
    for problem in problems:
        for root in problem.roots:
            open_paths: list[tuple[StagePlacement, ...]] = [(placement,) for placement in root.first_placements]
            while open_paths:
                path = open_paths.pop()
                if len(found) + len(open_paths) >= MAX_PIPELINES:
                    return ()
                if not path[-1].is_last:
                    open_paths += [(*path, successor) for successor in path[-1].successors]
                elif len(path) < len(problem.cuts):
                    found.append((problem, root, path))
                    num_entries += len(problem.lower_bound.costs.intervals.begins) * sum(p.num_replicas for p in path)
    return tuple(found) if num_entries <= MAX_ENTRIES else ()


def search_cuts(
    pipelines: Sequence[tuple[Problem, Root, tuple[StagePlacement, ...]]],
    *,
    max_actions: int,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
    incumbent: SearchResult | None = None,
) -> SearchResult | None:
    """Returns the fastest layout of some pipelines and a lower bound of all; None if it found none that fits.

    Args:
        pipelines: all of the problems, from `few_pipelines`; at least one.
        max_actions: how much work it may do, in simulated actions.
        deadline: ends it with the best layout so far.
        incumbent: a layout to begin with.
    """
    search = _CutSearch(Budget(max_actions, deadline), progress, incumbent)
    for problem, root, placements in pipelines:
        search.add(problem, root, placements)
    return search.run()


@dataclass(slots=True)
class _Tree:
    """The nodes of one pipeline.

    Attributes:
        pipeline: None before its first node is opened.
        paths: those known.
        bound_ns: of all its cuts.
        first_paths, first_simulated: what the game of its first node found.
    """

    problem: Problem
    placements: tuple[StagePlacement, ...]
    paths: Paths
    bound_ns: int
    pipeline: Pipeline | None = None
    first_paths: Paths = field(default_factory=dict)
    first_simulated: Simulated = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Node:
    """A set of cuts of a pipeline, None for all, and the paths and cuts that its game begins with."""

    tree: _Tree
    possible: PossibleCuts | None
    paths: Paths
    simulated: Simulated


class _CutSearch:
    def __init__(self, budget: Budget, progress: SearchProgress | None, incumbent: SearchResult | None) -> None:
        self.budget, self.progress, self.incumbent = budget, progress, incumbent
        self.best_ns = INF if incumbent is None else incumbent.step_ns
        self.not_best_ns = self.limit_ns = INF
        self.proven_ns = 0
        self.num_simulated = self._num_pushed = 0
        self.trees: list[_Tree] = []
        self.queue: list[tuple[int, int, _Node]] = []
        self._attempt_end = FIRST_ACTIONS

    def add(self, problem: Problem, root: Root, placements: tuple[StagePlacement, ...]) -> None:
        self.trees.append(_Tree(problem, placements, {}, root.bound_ns))

    def _push(self, bound_ns: int, node: _Node) -> None:
        self._num_pushed += 1
        heappush(self.queue, (bound_ns, -self._num_pushed, node))

    @property
    def below_ns(self) -> int:
        """Cuts that are no faster than this are of no interest: the best step, or the limit of an attempt."""
        return min(self.best_ns, self.limit_ns)

    def run(self) -> SearchResult | None:
        """Proves that no cuts are faster than the best step or, step by step, than limits below it."""
        self.proven_ns = min((tree.bound_ns for tree in self.trees), default=INF)
        share, actions = FIRST_SHARE, FIRST_ACTIONS
        while self.proven_ns < self.best_ns and not self.budget.is_over():
            gap_ns = self.best_ns - self.proven_ns
            is_small = self.best_ns < INF and gap_ns * MIN_GAP_DIVISOR < self.best_ns
            self.limit_ns = INF if share == 1 or is_small else self.proven_ns + max(1, int(share * gap_ns))
            self._attempt_end = self.budget.spent + actions
            self._attempt()
            is_done = not self.queue
            share, actions = (min(1.0, 2 * share), actions) if is_done else (share / 2, 2 * actions)
        if self.incumbent is None:
            return None
        return replace(self.incumbent, lower_bound_ns=min(self.proven_ns, self.best_ns, self.not_best_ns))

    def _attempt(self) -> None:
        """Opens the node with the smallest bound until none is below the limit, or the attempt's budget is spent."""
        self.queue.clear()
        for tree in self.trees:
            if tree.bound_ns < self.below_ns:
                self._push(tree.bound_ns, _Node(tree, None, tree.first_paths, tree.first_simulated))
        while self.queue and self.queue[0][0] < self.below_ns and not self._is_over():
            entry = heappop(self.queue)
            self.proven_ns = max(self.proven_ns, entry[0])
            try:
                self._open(entry[0], entry[2])
            except OutOfTime:
                heappush(self.queue, entry)
                break
            if self.progress and self.best_ns < INF:
                self.progress(self.num_simulated, self.best_ns, min(self.best_ns, self.proven_ns))
        if self.queue and self.queue[0][0] >= self.below_ns:
            self.queue.clear()
        self.proven_ns = max(self.proven_ns, min(self.below_ns, self.queue[0][0]) if self.queue else self.below_ns)

    def _is_over(self) -> bool:
        """Whether the attempt ends; without a plan that fits only the search's own budget ends it."""
        return self.budget.is_over() or (self.best_ns < INF and self.budget.spent >= self._attempt_end)

    def _check(self) -> None:
        if self._is_over():
            raise OutOfTime("the search of cuts ended before it was done")

    def _open(self, bound_ns: int, node: _Node) -> None:
        """Raises the bound of a node; then searches its cuts one by one, or divides them."""
        possible, paths, simulated = self._begin(node)
        bound_ns, possible = self._filter(node.tree, bound_ns, possible, paths)
        if bound_ns >= self.below_ns or possible.is_empty:
            return
        if possible.count() <= MAX_ENUMERATED:
            self._try_every(node.tree, possible)
            return
        simulated = {cuts: times for cuts, times in simulated.items() if possible.contains(cuts)} or simulated
        assert node.tree.pipeline is not None
        game = CutGame(node.tree.pipeline, possible, bound_ns, paths, simulated)
        self._play(node.tree, game, MAX_FIRST_ROUNDS if node.possible is None else MAX_ROUNDS)
        if node.possible is None:
            tree = node.tree
            tree.first_paths, tree.first_simulated = dict(game.paths), dict(game.simulated)
            tree.bound_ns = max(tree.bound_ns, min(game.bound_ns, self.below_ns))
        if game.bound_ns >= self.below_ns or game.possible.is_empty:
            return
        if game.possible.count() <= MAX_ENUMERATED:
            self._try_every(node.tree, game.possible)
            return
        paths, simulated = game.handed_down()
        for part in game.possible.split(*game.division()):
            self._push(game.bound_ns, _Node(node.tree, part, paths, simulated))

    def _play(self, tree: _Tree, game: CutGame, max_rounds: int) -> None:
        """Plays until the bound rises no more, or no cuts are left."""
        stalled = 0
        for _ in range(max_rounds):
            self._check()
            before = game.bound_ns
            self.budget.spend(game.cost)
            cuts = game.improve(self.below_ns)
            if cuts is None or cuts in game.simulated:
                return
            stalled = stalled + 1 if game.bound_ns < before * MIN_RISE else 0
            if stalled == MAX_STALLED:
                return
            game.simulated[cuts], weights = self._try_cuts(tree, cuts)
            game.add_path(weights)

    def _begin(self, node: _Node) -> tuple[PossibleCuts, Paths, Simulated]:
        """Returns what a node begins with: a first node, the cuts of naive plans and of the best layout."""
        tree = node.tree
        if tree.pipeline is None:
            tree.pipeline = Pipeline(tree.problem, tree.placements)
        possible = all_cuts(tree.pipeline) if node.possible is None else node.possible
        paths, simulated = dict(node.paths), dict(node.simulated)
        if node.possible is None:
            starts = list(naive_cuts(tree.problem, tree.placements))
            best = self.incumbent
            if best is not None and best.layout.placements == tree.placements:
                starts.append(tuple(tree.problem.cuts.index(cut) for cut in best.layout.cuts))
            for cuts in starts:
                times, weights = self._try_cuts(tree, cuts)
                simulated[cuts], paths[weights.tobytes()] = times, weights
        return possible, paths, simulated

    def _filter(self, tree: _Tree, bound_ns: int, possible: PossibleCuts, paths: Paths) -> tuple[int, PossibleCuts]:
        """Removes intervals by the paths known of a pipeline; adds the longest ones to `paths`."""
        assert tree.pipeline is not None
        while not possible.is_empty:
            count = min(len(tree.paths), MAX_FILTERS, MAX_FILTER_SUMS // possible.size)
            known = [w for w in islice(reversed(tree.paths.values()), count) if is_exact(tree.pipeline, w)]
            if not known:
                break
            self._check()
            before = possible.num_arcs
            weights = np.array(known, dtype=float)
            found = minimize(tree.pipeline, weights, np.ones(len(known)), possible, self.below_ns)
            self.budget.spend(sweep_cost(len(known), possible))
            bound_ns, possible = max(bound_ns, least_whole(found.bounds.max())), found.possible
            if bound_ns >= self.below_ns:
                break
            for i in np.argsort(-found.bounds, kind="stable")[:NUM_LAST_KEPT]:
                paths[known[i].tobytes()] = known[i]
            if possible.num_arcs > 0.7 * before:
                break
        return bound_ns, possible

    def _try_every(self, tree: _Tree, possible: PossibleCuts) -> None:
        """Simulates the cuts that may be faster than the best layout, those with the smallest bound first."""
        assert tree.pipeline is not None
        every = possible.every()
        times, _ = tree.pipeline.time_vectors(every)
        exact = times.astype(float)
        known = np.array([w for w in islice(reversed(tree.paths.values()), MAX_FILTERS) if is_exact(tree.pipeline, w)])
        bounds_ns = (exact @ known.T.astype(float)).max(axis=1) if len(known) else np.zeros(len(every))
        self.budget.spend(exact.size * len(known) // PRODUCTS_PER_ACTION)
        while len(bounds_ns):
            i = int(np.argmin(bounds_ns))
            if bounds_ns[i] >= self.below_ns:
                return
            self._check()
            _, weights = self._try_cuts(tree, tuple(every[i].tolist()))
            if is_exact(tree.pipeline, weights):
                bounds_ns = np.maximum(bounds_ns, exact @ weights)
            bounds_ns[i] = np.inf

    def _try_cuts(self, tree: _Tree, cuts: Cuts) -> tuple[IntArray, IntArray]:
        """Simulates cuts if their longest path is shorter than the best step; returns their times, and that path."""
        pipeline = tree.pipeline
        assert pipeline is not None
        times, fits = pipeline.time_vectors([cuts])
        length_ns, weights = pipeline.longest_path(times[0])
        self.budget.spend(2 * pipeline.num_actions)
        # The last path known comes last.
        tree.paths.pop(weights.tobytes(), None)
        tree.paths[weights.tobytes()] = weights
        if fits[0] and length_ns < self.best_ns:
            self._simulate(tree, cuts, length_ns)
        return times[0], weights

    def _simulate(self, tree: _Tree, cuts: Cuts, length_ns: int) -> None:
        assert tree.pipeline is not None
        problem = tree.problem
        self.budget.spend(tree.pipeline.simulation_cost)
        self.num_simulated += 1
        layout = problem.layout(cuts, tree.placements)
        if not layout.is_best:  # other recomputed layers may be faster, but not than the longest path of the least ones
            self.not_best_ns = min(self.not_best_ns, max(length_ns, layout.bound_ns))
        if not problem.fits(layout):
            return
        step_ns = problem.step_ns(layout)
        if step_ns < self.best_ns:
            self.best_ns = step_ns
            self.incumbent = SearchResult(problem=problem, layout=layout, step_ns=step_ns, lower_bound_ns=step_ns)
