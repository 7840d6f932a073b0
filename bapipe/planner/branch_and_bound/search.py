"""Best-first branch and bound over partial plans.

The queue holds nodes of the search tree, the smallest lower bound first. A node is a root (a choice of devices), a
partial plan, or a child that has not been made yet: the children of a partial plan are bounded all at once with numpy,
sorted, and pushed one at a time. Popping a child pushes its next sibling (lazy successor generation), so the queue has
one entry per expanded node. When the smallest bound in the queue reaches the incumbent's step time, the incumbent is
optimal.

Incumbents come from dives (greedy completions by the smallest bound), and are improved by local search. All work is
charged to the node budget, so that the result does not depend on the speed of the machine.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from bapipe.planner.branch_and_bound.infeasible import fitting_layout, least_infeasible
from bapipe.planner.branch_and_bound.local_search import change_schedule, move_cut, move_device
from bapipe.planner.branch_and_bound.partial_plan import PartialPlan
from bapipe.planner.branch_and_bound.problem import Problem, Root, SearchResult
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, NothingFoundError, OutOfTime
from bapipe.planner.stages.intervals import INF, IntArray
from bapipe.progress import SearchProgress

DEFAULT_MAX_NODES = 20_000
"""Node budget of a search."""

ACTIONS_PER_NODE = 1200
"""How many actions the simulator runs in the time in which one partial plan is expanded."""

EVENT_DRIVEN_FACTOR = 20
"""How many times as long as the longest path the event-driven engine of the simulator takes."""

NODES_BETWEEN_DIVES = 20
"""How many partial plans are expanded between two dives."""


def best_first(
    problems: Sequence[Problem],
    *,
    max_nodes: int = DEFAULT_MAX_NODES,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
    incumbent: SearchResult | None = None,
) -> SearchResult | None:
    """Returns the fastest layout over all problems, None if it is proven that none fits.

    It is optimal unless the search ended early, after `max_nodes` or at the deadline; its `lower_bound_ns` is the bound
    proven by then.

    Args:
        max_nodes: the node budget; simulations count as nodes, at the rates above.
        incumbent: a layout to begin with.

    Raises:
        OutOfTime: the deadline passed before a layout that fits was found.
        NothingFoundError: no layout that fits was found, but there may be one: the budget was spent, or some choices of
            recomputed layers were not tried.
    """
    search = _BestFirst(problems, progress, deadline)
    if incumbent is not None:
        search.incumbent, search.upper_bound_ns = incumbent, incumbent.step_ns
    try:
        while search.is_open and search.num_nodes < max_nodes:
            deadline.check()
            search.expand_best()
        if search.incumbent is None and not search.has_tried_all:
            search.begin_with_least_memory()
    except OutOfTime as error:
        if search.incumbent is None:
            error.lower_bound_ns = int(search.proven_bound_ns)
            raise
    if search.incumbent is None and not search.has_tried_all:
        raise NothingFoundError("no plan was found that fits in memory; there may be one")
    return search.result()


def best_below(
    problems: Sequence[Problem],
    below_ns: int,
    *,
    max_gap: float,
    max_nodes: int,
    deadline: Deadline = UNLIMITED,
    progress: SearchProgress | None = None,
) -> tuple[SearchResult | None, int]:
    """Returns the fastest layout found with a step below `below_ns`, None without one, and a lower bound.

    The lower bound holds for all layouts, and is at most `below_ns`.

    Args:
        below_ns: the step time of a known plan.
        max_gap: the search ends when the fastest known step exceeds the bound by at most this fraction of the bound.
        max_nodes: the node budget.
        deadline: ends the search with what has been found.
    """
    search = _BestFirst(problems, progress, deadline)
    search.upper_bound_ns = min(below_ns, INF)
    with suppress(OutOfTime):
        while search.is_open and search.num_nodes < max_nodes and not search.is_within(max_gap):
            deadline.check()
            search.expand_best()
    return search.result(), int(search.proven_bound_ns)


class _BestFirst:
    """The state of a search.

    Attributes:
        incumbent: the best layout so far.
        upper_bound_ns: the step time of the fastest known plan: the incumbent, or a plan of the caller; else `INF`.
        num_nodes: the budget spent, in nodes.
        queue: (lower bound, tie-breaker, sequence number, node); of equal bounds, the deepest first, then the oldest.
    """

    def __init__(self, problems: Sequence[Problem], progress: SearchProgress | None, deadline: Deadline) -> None:
        self.problems, self.progress, self.deadline = problems, progress, deadline
        self.incumbent: SearchResult | None = None
        self.upper_bound_ns = INF
        self._largest_popped_ns = 0
        # The smallest bound of a simulated layout for which another choice of recomputed layers might be faster.
        self._open_choice_ns = INF
        self.num_nodes = self._num_simulated = self._num_pushed = self._since_dive = 0
        self.queue: list[tuple[int, int, int, _Node]] = []
        for problem in problems:
            for root in problem.roots:
                self._num_pushed += 1
                self.queue.append((root.bound_ns, 0, self._num_pushed, _Node(problem, root=root)))
        heapify(self.queue)

    @property
    def is_open(self) -> bool:
        """Whether a node can still lead to a better layout."""
        return bool(self.queue) and self.lower_bound_ns < self.upper_bound_ns

    @property
    def has_tried_all(self) -> bool:
        """Whether no layout can be better than the incumbent or, if there is none, fit."""
        return not self.is_open and self._open_choice_ns >= self.upper_bound_ns

    def is_within(self, gap: float) -> bool:
        """Returns whether the fastest known step exceeds the lower bound by at most a fraction `gap` of the bound."""
        return self.upper_bound_ns <= self.lower_bound_ns * (1 + gap)

    @property
    def lower_bound_ns(self) -> int:
        """The lower bound proven so far for all layouts with the recomputed layers that the planner chooses.

        Pruned layouts are no better than the incumbent, and the bounds in the queue hold for all others. If devices
        have several stages, a child's bound may be smaller than its parent's, which holds for it, too. So the smallest
        bound in the queue may decrease, but its largest value so far remains valid.
        """
        smallest_ns = self.queue[0][0] if self.queue else self.upper_bound_ns
        return min(self.upper_bound_ns, max(self._largest_popped_ns, smallest_ns))

    @property
    def proven_bound_ns(self) -> int:
        """The lower bound proven so far for all layouts with any choice of recomputed layers."""
        return min(self.lower_bound_ns, self._open_choice_ns)

    def result(self) -> SearchResult | None:
        """Returns the incumbent with the bound proven so far; None if there is no incumbent."""
        if self.incumbent is None:
            return None
        return SearchResult(
            problem=self.incumbent.problem,
            layout=self.incumbent.layout,
            step_ns=self.upper_bound_ns,
            lower_bound_ns=int(self.proven_bound_ns),
            is_exhausted=not self.is_open,
        )

    def expand_best(self) -> None:
        """Expands the node with the smallest lower bound."""
        entry = heappop(self.queue)
        self._largest_popped_ns = max(self._largest_popped_ns, entry[0])
        self.num_nodes += 1
        try:
            self._expand(entry[0], entry[3])
        except OutOfTime:
            # Some of its children may not be in the queue yet: the node goes back, so that the bound covers them.
            heappush(self.queue, entry)
            raise

    def _expand(self, bound_ns: int, node: "_Node") -> None:
        """Makes the partial plan of a node, then pushes its children, or simulates it if it is complete."""
        if node.root is not None:
            self._expand_root(node.problem, node.root)
            return
        partial = node.partial
        assert partial is not None
        # Lazy successor generation: the next sibling replaces this child in the queue, then the child is made.
        if node.siblings is not None:
            self._push_child(node.problem, partial, node.siblings, node.number + 1)
            partial = node.problem.lower_bound.extend(partial, *node.siblings.choice(node.number))
        if partial.is_complete:
            self._try_and_improve(node.problem, partial, bound_ns)
            return
        # Branching: all children are bounded at once; those that cannot beat the incumbent are dropped.
        children = _Children(*node.problem.lower_bound.children(partial), self.upper_bound_ns)
        self._push_child(node.problem, partial, children, 0)
        self._since_dive += 1
        # This node had the smallest bound of all, so the fastest plans may be among its completions.
        if self._since_dive >= NODES_BETWEEN_DIVES:
            self._since_dive = 0
            self._dive(node.problem, partial, bound_ns)

    def _expand_root(self, problem: Problem, root: Root) -> None:
        """Pushes a plan without placed stages for each first placement. Its bound needs tables, the root's did not."""
        # If devices have several stages, the bound of the root may come from another search, and is kept.
        known_ns = root.bound_ns if root.num_positions else 0
        empty_plans = [
            (bound_ns, partial)
            for bound_ns, partial in problem.lower_bound.roots(root.first_placements, root.num_positions, known_ns)
            if bound_ns < self.upper_bound_ns
        ]
        for bound_ns, partial in empty_plans:
            self._num_pushed += 1
            heappush(self.queue, (bound_ns, 0, self._num_pushed, _Node(problem, partial=partial)))
        # Without an upper bound nothing is pruned, so a first plan is made before any expansion.
        if empty_plans and self.upper_bound_ns >= INF:
            bound_ns, partial = min(empty_plans, key=lambda entry: entry[0])
            self._dive(problem, partial, bound_ns)

    def _push_child(self, problem: Problem, partial: PartialPlan, children: "_Children", number: int) -> None:
        """Pushes one child, unless it and all later siblings cannot beat the incumbent: their bounds ascend."""
        if number < len(children.bounds_ns) and children.bounds_ns[number] < self.upper_bound_ns:
            self._num_pushed += 1
            entry = (int(children.bounds_ns[number]), -len(partial.boundaries), self._num_pushed)
            heappush(self.queue, (*entry, _Node(problem, partial=partial, siblings=children, number=number)))

    def _dive(self, problem: Problem, partial: PartialPlan, bound_ns: int) -> None:
        """Completes a partial plan greedily, each time by the child with the smallest bound, and simulates it."""
        while not partial.is_complete:
            self.deadline.check()
            bounds_ns, ends, numbers = problem.lower_bound.children(partial)
            self.num_nodes += 1
            best = int(np.argmin(bounds_ns))
            # All children are pruned.
            if bounds_ns[best] >= self.upper_bound_ns:
                return
            partial = problem.lower_bound.extend(partial, int(ends[best]), int(numbers[best]))
        self._try_and_improve(problem, partial, bound_ns)

    def _try_and_improve(self, problem: Problem, partial: PartialPlan, bound_ns: int) -> None:
        """Simulates a complete plan; if it is a new incumbent, improves it by local search to a local optimum."""
        improved = (problem, partial) if self._try_incumbent(problem, partial) else None
        # Once the step equals the bound of the node, no plan below that node is faster.
        while improved is not None and bound_ns < self.upper_bound_ns:
            improved = self._first_improvement(*improved)
        if self.progress and self.incumbent:
            self.progress(self._num_simulated, self.upper_bound_ns, int(self.proven_bound_ns))

    def _first_improvement(self, problem: Problem, partial: PartialPlan) -> tuple[Problem, PartialPlan] | None:
        """Returns the first neighbour that is better than the incumbent, now the incumbent; None if there is none."""
        others = [other for other in self.problems if other is not problem]
        for neighbours, in_problems in ((change_schedule, others), (move_cut, [problem]), (move_device, [problem])):
            for candidate_problem in in_problems:
                for candidate in neighbours(candidate_problem, partial, self.upper_bound_ns):
                    self.deadline.check()
                    if candidate is None:
                        continue
                    self.num_nodes += len(candidate.placements)
                    if self._try_incumbent(candidate_problem, candidate):
                        return candidate_problem, candidate
        return None

    def begin_with_least_memory(self) -> None:
        """Makes the layout that lacks the least memory the incumbent, if it fits. Used if dives found none."""
        self.incumbent = fitting_layout(least_infeasible(self.problems, self.deadline))
        if self.incumbent is not None:
            self.upper_bound_ns = self.incumbent.step_ns

    def _try_incumbent(self, problem: Problem, partial: PartialPlan) -> bool:
        """Simulates a complete plan; returns whether it fits and became the incumbent."""
        layout = problem.layout(partial.boundaries, partial.placements)
        # At most F, I and W for each micro-batch in each stage.
        num_actions = 3 * len(layout.placements) * problem.num_microbatches
        factor = 1 if problem.is_cheap_to_simulate(layout) else EVENT_DRIVEN_FACTOR
        self.num_nodes += num_actions * factor // ACTIONS_PER_NODE
        self._num_simulated += 1
        if not layout.is_best:
            self._open_choice_ns = min(self._open_choice_ns, max(partial.bound_ns, layout.bound_ns))
        if not problem.fits(layout):
            return False
        step_ns = problem.step_ns(layout)
        if step_ns > self.upper_bound_ns:
            return False
        found = SearchResult(problem=problem, layout=layout, step_ns=step_ns, lower_bound_ns=step_ns)
        if step_ns == self.upper_bound_ns:
            # It may take the incumbent's place, but local search does not go on from it: that is for faster plans.
            if self.incumbent is not None:
                self.incumbent = min(self.incumbent, found, key=lambda each: each.preference)
            return False
        self.incumbent, self.upper_bound_ns = found, step_ns
        return True


class _Children:
    """The children of a partial plan that can still beat the incumbent, ascending by bound. All [children]"""

    __slots__ = ("bounds_ns", "ends", "numbers")

    def __init__(self, bounds_ns: IntArray, ends: IntArray, numbers: IntArray, upper_bound_ns: int) -> None:
        open_children = np.flatnonzero(bounds_ns < upper_bound_ns)
        ascending = open_children[np.argsort(bounds_ns[open_children], kind="stable")]
        self.bounds_ns, self.ends, self.numbers = bounds_ns[ascending], ends[ascending], numbers[ascending]

    def choice(self, number: int) -> tuple[int, int]:
        """Returns the end of a child's stage and the index of its next placement: arguments of `LowerBound.extend`."""
        return int(self.ends[number]), int(self.numbers[number])


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the search tree: a root, a partial plan, or a child of a partial plan that has not been made yet.

    Attributes:
        root: of a root only.
        partial: the partial plan, or the parent of the child.
        siblings: the children of `partial` if this is one of them.
        number: the index of this child in `siblings`.
    """

    problem: Problem
    root: Root | None = None
    partial: PartialPlan | None = None
    siblings: _Children | None = None
    number: int = 0
