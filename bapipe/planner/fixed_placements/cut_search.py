"""Branch and bound over the cuts of pipelines whose placements are fixed, with bounds from paths.

A node is a pipeline and a set of possible cuts (`possible_cuts.py`). Its bound comes from the game of cuts against
paths (`path_bound.py`), played only with these cuts (`cut_game.py`). Each path and each mixture of paths also removes
the intervals that no cuts faster than the best step have. The node with the smallest bound is expanded next: it is
divided at the cut whose position varies most in the mixed strategy of the cuts. A node with few cuts is enumerated: the
longest known path is a lower bound on the step of each cut, and those below the best step are simulated.

The smaller the gap between the bound and the best step, the more intervals are removed. So the search first asks if any
cuts are faster than a *limit* between the two. An attempt at a limit that ends without open nodes proves that there are
none: the limit is a bound, and the next limit is higher. If an attempt exceeds its budget, the next limit is lower.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from bapipe.planner.branch_and_bound.problem import Problem, Root, SearchResult
from bapipe.planner.branch_and_bound.step_limits import FIRST_SHARE, is_small_gap
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.fixed_placements.budget import Budget
from bapipe.planner.fixed_placements.cut_game import (
    NUM_LAST_KEPT,
    CutGame,
    CutTimes,
    is_exact,
    round_up,
    sweep_cost,
)
from bapipe.planner.fixed_placements.local_search import PRODUCTS_PER_ACTION
from bapipe.planner.fixed_placements.naive_cuts import Cuts, naive_cuts
from bapipe.planner.fixed_placements.path_bound import Paths
from bapipe.planner.fixed_placements.placed_pipeline import MAX_ENTRIES, PlacedPipeline
from bapipe.planner.fixed_placements.possible_cuts import PossibleCuts, all_cuts, minimize
from bapipe.planner.stages.intervals import INF, IntArray
from bapipe.planner.stages.placements import StagePlacement
from bapipe.progress import SearchProgress

MAX_PIPELINES = 64
"""Maximum number of pipelines of all problems together, for this search to take them."""

MAX_ENUMERATED = 4_000
"""A node is enumerated if it has at most this many cuts."""

FIRST_ACTIONS = 3_000_000
"""The budget of the first attempt, in simulated actions; it doubles after each attempt that exceeds it."""

MAX_FILTERS, MAX_FILTER_SUMS = 300, 3_000_000
"""Maximum number of known paths that remove intervals when a node is expanded, and of the sums that this takes."""

MAX_FIRST_ROUNDS, MAX_ROUNDS = 30, 6
"""Maximum number of rounds of the game of a pipeline's root node, and of that of any other node."""

MIN_RISE, MAX_STALLED = 1.002, 2
"""A game ends after `MAX_STALLED` rounds in a row that raise the bound by less than the factor `MIN_RISE`."""


def few_pipelines(problems: Sequence[Problem]) -> tuple[tuple[Problem, Root, tuple[StagePlacement, ...]], ...]:
    """Returns every pipeline of some problems; () if these are too many or too large, or not made in time."""
    with suppress(OutOfTime):  # the caller may know a plan already
        return _few_pipelines(problems)
    return ()


def _few_pipelines(problems: Sequence[Problem]) -> tuple[tuple[Problem, Root, tuple[StagePlacement, ...]], ...]:
    """Returns the same; raises OutOfTime if they are not made in time."""
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
    """Returns the fastest layout found, with a lower bound for all layouts; None if none that fits was found.

    Args:
        pipelines: all pipelines of the problems, from `few_pipelines`; at least one.
        max_actions: the budget, in simulated actions.
        deadline: ends the search with the best layout so far.
        incumbent: a layout to begin with.
    """
    search = _CutSearch(Budget(max_actions, deadline), progress, incumbent)
    for problem, root, placements in pipelines:
        search.add(problem, root, placements)
    return search.run()


@dataclass(slots=True)
class _Tree:
    """The search tree of one pipeline.

    Attributes:
        paths: the known paths.
        bound_ns: a lower bound on the step of all cuts.
        pipeline: None until the root node is first expanded.
        first_paths, first_cut_times: what the game of the root node found, from which the next attempt begins.
    """

    problem: Problem
    placements: tuple[StagePlacement, ...]
    paths: Paths
    bound_ns: int
    pipeline: PlacedPipeline | None = None
    first_paths: Paths = field(default_factory=dict)
    first_cut_times: CutTimes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a tree.

    Attributes:
        possible: its cuts; None in the root node, which has all.
        paths, cut_times: the paths and cuts with which its game begins.
    """

    tree: _Tree
    possible: PossibleCuts | None
    paths: Paths
    cut_times: CutTimes


class _CutSearch:
    """The state of a search.

    Attributes:
        incumbent, best_ns: the best layout so far, and its step time; None and `INF` without one.
        open_choice_ns: the smallest bound of a simulated layout for which another choice of recomputed layers might be
            faster.
        limit_ns: the limit of the current attempt; `INF` if it looks for any faster cuts.
        proven_ns: a lower bound on the step of all cuts, with the recomputed layers that the planner chooses.
        queue: (lower bound, tie-breaker, node): of equal bounds, the newest first.
    """

    def __init__(self, budget: Budget, progress: SearchProgress | None, incumbent: SearchResult | None) -> None:
        self.budget, self.progress, self.incumbent = budget, progress, incumbent
        self.best_ns = INF if incumbent is None else incumbent.step_ns
        self.open_choice_ns = self.limit_ns = INF
        self.proven_ns = 0
        self.num_simulated = self._num_pushed = 0
        self.trees: list[_Tree] = []
        self.queue: list[tuple[int, int, _Node]] = []
        self._attempt_end = FIRST_ACTIONS

    def add(self, problem: Problem, root: Root, placements: tuple[StagePlacement, ...]) -> None:
        """Adds a pipeline to be searched."""
        self.trees.append(_Tree(problem, placements, {}, root.bound_ns))

    def _push(self, bound_ns: int, node: _Node) -> None:
        self._num_pushed += 1
        heappush(self.queue, (bound_ns, -self._num_pushed, node))

    @property
    def below_ns(self) -> int:
        """Only faster cuts than this are searched: the best step, or the limit of the current attempt."""
        return min(self.best_ns, self.limit_ns)

    def run(self) -> SearchResult | None:
        """Makes attempts at one limit after another; returns the incumbent with the bound proven, None without one."""
        self.proven_ns = min((tree.bound_ns for tree in self.trees), default=INF)
        share, actions = FIRST_SHARE, FIRST_ACTIONS
        while self.proven_ns < self.best_ns and not self.budget.is_over():
            gap_ns = self.best_ns - self.proven_ns
            is_small = self.best_ns < INF and is_small_gap(self.proven_ns, self.best_ns)
            self.limit_ns = INF if share == 1 or is_small else self.proven_ns + max(1, int(share * gap_ns))
            self._attempt_end = self.budget.spent + actions
            self._attempt()
            is_done = not self.queue
            share, actions = (min(1.0, 2 * share), actions) if is_done else (share / 2, 2 * actions)
        if self.incumbent is None:
            return None
        return replace(self.incumbent, lower_bound_ns=min(self.proven_ns, self.best_ns, self.open_choice_ns))

    def _attempt(self) -> None:
        """Expands the node with the smallest bound until none is below the limit, or the attempt's budget is spent.

        If the queue is then empty, no cuts are faster than the limit.
        """
        self.queue.clear()
        for tree in self.trees:
            if tree.bound_ns < self.below_ns:
                self._push(tree.bound_ns, _Node(tree, None, tree.first_paths, tree.first_cut_times))
        while self.queue and self.queue[0][0] < self.below_ns and not self._is_over():
            entry = heappop(self.queue)
            self.proven_ns = max(self.proven_ns, entry[0])
            try:
                self._expand(entry[0], entry[2])
            except OutOfTime:
                heappush(self.queue, entry)
                break
            if self.progress and self.best_ns < INF:
                self.progress(self.num_simulated, self.best_ns, min(self.best_ns, self.proven_ns, self.open_choice_ns))
        if self.queue and self.queue[0][0] >= self.below_ns:
            self.queue.clear()
        self.proven_ns = max(self.proven_ns, min(self.below_ns, self.queue[0][0]) if self.queue else self.below_ns)

    def _is_over(self) -> bool:
        """Returns whether the attempt must end. If no known plan fits, only the budget of the whole search ends it."""
        return self.budget.is_over() or (self.best_ns < INF and self.budget.spent >= self._attempt_end)

    def _check(self) -> None:
        """Raises OutOfTime if the attempt must end."""
        if self._is_over():
            raise OutOfTime("the search of cuts ended before it was done")

    def _expand(self, bound_ns: int, node: _Node) -> None:
        """Raises the bound of a node, then enumerates its cuts or pushes two nodes into which it is divided."""
        possible, paths, cut_times = self._start_of(node)
        bound_ns, possible = self._filter(node.tree, bound_ns, possible, paths)
        if bound_ns >= self.below_ns or possible.is_empty:
            return
        if possible.count() <= MAX_ENUMERATED:
            self._enumerate(node.tree, possible)
            return
        cut_times = {cuts: times for cuts, times in cut_times.items() if possible.contains(cuts)} or cut_times
        assert node.tree.pipeline is not None
        game = CutGame(node.tree.pipeline, possible, bound_ns, paths, cut_times)
        self._play(node.tree, game, MAX_FIRST_ROUNDS if node.possible is None else MAX_ROUNDS)
        if node.possible is None:
            tree = node.tree
            tree.first_paths, tree.first_cut_times = dict(game.paths), dict(game.cut_times)
            tree.bound_ns = max(tree.bound_ns, min(game.bound_ns, self.below_ns))
        if game.bound_ns >= self.below_ns or game.possible.is_empty:
            return
        if game.possible.count() <= MAX_ENUMERATED:
            self._enumerate(node.tree, game.possible)
            return
        paths, cut_times = game.most_used()
        for part in game.possible.split(*game.split_point()):
            self._push(game.bound_ns, _Node(node.tree, part, paths, cut_times))

    def _play(self, tree: _Tree, game: CutGame, max_rounds: int) -> None:
        """Plays rounds of a game until its bound hardly rises any more, or no cuts are left."""
        stalled = 0
        for _ in range(max_rounds):
            self._check()
            before = game.bound_ns
            self.budget.spend(game.cost)
            cuts = game.play_round(self.below_ns)
            if cuts is None or cuts in game.cut_times:
                return
            stalled = stalled + 1 if game.bound_ns < before * MIN_RISE else 0
            if stalled == MAX_STALLED:
                return
            game.cut_times[cuts], weights = self._try_cuts(tree, cuts)
            game.add_path(weights)

    def _start_of(self, node: _Node) -> tuple[PossibleCuts, Paths, CutTimes]:
        """Returns the cuts of a node, and the paths and time vectors with which its game begins.

        In a root node these include naive cuts, and those of the best layout.
        """
        tree = node.tree
        if tree.pipeline is None:
            tree.pipeline = PlacedPipeline(tree.problem, tree.placements)
        possible = all_cuts(tree.pipeline) if node.possible is None else node.possible
        paths, cut_times = dict(node.paths), dict(node.cut_times)
        if node.possible is None:
            starts = list(naive_cuts(tree.problem, tree.placements))
            best = self.incumbent
            if best is not None and best.layout.placements == tree.placements:
                starts.append(tuple(tree.problem.cuts.index(cut) for cut in best.layout.cuts))
            for cuts in starts:
                times, weights = self._try_cuts(tree, cuts)
                cut_times[cuts], paths[weights.tobytes()] = times, weights
        return possible, paths, cut_times

    def _filter(self, tree: _Tree, bound_ns: int, possible: PossibleCuts, paths: Paths) -> tuple[int, PossibleCuts]:
        """Raises the bound of a node and removes intervals by known paths of its pipeline.

        Returns the bound and the cuts that are left; adds to `paths` those that give the largest bounds.
        """
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
            bound_ns, possible = max(bound_ns, round_up(found.bounds.max())), found.possible
            if bound_ns >= self.below_ns:
                break
            for i in np.argsort(-found.bounds, kind="stable")[:NUM_LAST_KEPT]:
                paths[known[i].tobytes()] = known[i]
            if possible.num_arcs > 0.7 * before:
                break
        return bound_ns, possible

    def _enumerate(self, tree: _Tree, possible: PossibleCuts) -> None:
        """Simulates the cuts that may be below the limit, those with the smallest bounds first."""
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
        """Simulates cuts if their longest path is shorter than the best step.

        Returns their time vector and the weights of the longest path.
        """
        pipeline = tree.pipeline
        assert pipeline is not None
        times, fits = pipeline.time_vectors([cuts])
        length_ns, weights = pipeline.longest_path(times[0])
        self.budget.spend(2 * pipeline.path_cost)
        # A path that was known before moves to the end.
        tree.paths.pop(weights.tobytes(), None)
        tree.paths[weights.tobytes()] = weights
        if fits[0] and length_ns < self.best_ns:
            self._simulate(tree, cuts, length_ns)
        return times[0], weights

    def _simulate(self, tree: _Tree, cuts: Cuts, length_ns: int) -> None:
        """Simulates cuts, whose longest path is given, and keeps them if they are the best."""
        assert tree.pipeline is not None
        problem = tree.problem
        self.budget.spend(tree.pipeline.simulation_cost)
        self.num_simulated += 1
        layout = problem.layout(cuts, tree.placements)
        if not layout.is_best:  # another choice of recomputed layers may be faster, but not below the longest path
            self.open_choice_ns = min(self.open_choice_ns, max(length_ns, layout.bound_ns))
        if not problem.fits(layout):
            return
        step_ns = problem.step_ns(layout)
        if step_ns < self.best_ns:
            self.best_ns = step_ns
            self.incumbent = SearchResult(problem=problem, layout=layout, step_ns=step_ns, lower_bound_ns=step_ns)
