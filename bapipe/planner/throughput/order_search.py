"""The search for the smallest largest load in one order of the devices, at every micro-batch size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.throughput.large_graph import LargeGraph
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution
from bapipe.planner.throughput.loads import Boundaries
from bapipe.planner.throughput.memory_shortfall import Shortfall, least_shortfall, reduced
from bapipe.progress import LoadProgress

MIN_IMPROVEMENT = 0.9998
"""The neighbourhood search continues while it lowers the load below this share of the previous one."""

Near = Callable[[LoadSolution], Boundaries]
"""Returns the boundaries at the downsets next to the cuts of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundInOrder:
    """What a search in one order of the devices has found; `best` is None without a plan that fits."""

    best: LoadSolution | None
    bounds_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSearch:
    """What is searched in one order of the devices.

    Attributes:
        ranks: those of the cluster, in the order. Plans have these.
        search: the search over all boundaries, on devices in the order.
        coarse: the search over few boundaries, for a first plan where no time is left for more.
        near: None if all downsets are boundaries.
        large: what is known of graphs with more downsets than boundaries.
        improves: whether plans are improved where not all downsets are boundaries.
    """

    ranks: tuple[int, ...]
    search: LoadSearch
    coarse: LoadSearch
    near: Near | None
    large: LargeGraph
    improves: bool

    def solve(
        self,
        microbatch_sizes: Sequence[int],
        below_ns: float,
        progress_of: Callable[[int], LoadProgress],
        deadline: Deadline,
    ) -> FoundInOrder:
        """Returns the best plan with a smaller load than `below_ns` that was found, and bounds on all of them.

        Args:
            below_ns: infinite for any plan.
            progress_of: returns the progress of a search at one micro-batch size.
        """
        solutions: list[LoadSolution] = []
        for size in microbatch_sizes:
            if below_ns < inf:  # of a later order: only a better plan is of use
                below_ns = min([below_ns, *(found.load_ns for found in solutions if found.stages)])
            below = replace(self.search, below_ns=below_ns)
            solutions.append(below.solve(size, progress_of(size), deadline))
        feasible = [solution for solution in solutions if solution.stages]
        # A search that the deadline ends has no plan at all: it finds the best one at once, or none.
        if not feasible and deadline.is_over:
            below = replace(self.coarse, below_ns=below_ns)
            feasible = [found for found in map(below.solve, _ends(microbatch_sizes)) if found.stages]
        found = FoundInOrder(best=best_of(feasible), bounds_ns=tuple(solution.bound_ns for solution in solutions))
        return self.improved(found, solutions, progress_of, deadline)

    def improved(
        self,
        found: FoundInOrder,
        solutions: Sequence[LoadSolution],
        progress_of: Callable[[int], LoadProgress],
        deadline: Deadline,
    ) -> FoundInOrder:
        """Returns the best plan after more searches at its micro-batch size, then at the others; with their bounds."""
        best, near = found.best, self.near
        if best is None or near is None or not self.improves or deadline.is_over:
            return self._of_cluster(found)
        large = replace(self.large, deadline=deadline)
        best = large.improved(self.search, best)
        if best.bound_ns < best.load_ns:
            best = self._local_optimum(best, near, progress_of(best.microbatch_size), deadline)
        bounds_ns, size = [best.bound_ns], best.microbatch_size
        for solution in solutions:
            if solution.microbatch_size != size:
                other = large.below(self.search, solution, best.load_ns)
                best = other if other.stages else best
                bounds_ns.append(other.bound_ns)
        return self._of_cluster(FoundInOrder(best=best, bounds_ns=tuple(bounds_ns)))

    def closest(self, microbatch_size: int, known: Shortfall | None, deadline: Deadline) -> Shortfall | None:
        """Returns the plan that lacks the least memory, in ranks of the order; None if the deadline passed before any.

        Args:
            known: a plan in another order, which is returned unless one in this order lacks clearly less.
        """
        closest = least_shortfall(self.search, microbatch_size, deadline, known)
        if closest is not None and closest is not known and self.near is not None:
            closest = reduced(self.search, closest, self.near, deadline)
        return closest

    def _local_optimum(
        self, solution: LoadSolution, near: Near, progress: LoadProgress | None, deadline: Deadline
    ) -> LoadSolution:
        """Returns a local optimum: the exact search repeated among the downsets next to the best cuts so far."""
        while not deadline.is_over:
            search = replace(self.search, boundaries=near(solution))
            better = search.solve(solution.microbatch_size, progress, deadline)
            if better.load_ns >= MIN_IMPROVEMENT * solution.load_ns or not better.stages:
                return solution
            solution = replace(better, bound_ns=solution.bound_ns)
        return solution

    def _of_cluster(self, found: FoundInOrder) -> FoundInOrder:
        """Returns the same with the cluster's ranks."""
        if found.best is None:
            return found
        stages = tuple((layers, tuple(self.ranks[rank] for rank in ranks)) for layers, ranks in found.best.stages)
        return replace(found, best=replace(found.best, stages=stages))


def best_of(solutions: Sequence[LoadSolution]) -> LoadSolution | None:
    """Returns the solution with the smallest load, None of none.

    Of equal loads the larger micro-batch wins: it has fewer transfers and a shorter order.
    """
    return min(solutions, key=lambda solution: (solution.load_ns, -solution.microbatch_size), default=None)


def _ends(microbatch_sizes: Sequence[int]) -> list[int]:
    return [*dict.fromkeys((microbatch_sizes[0], microbatch_sizes[-1]))]
