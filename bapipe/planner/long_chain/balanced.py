"""Constructs the first plans of a long chain: equal numbers of replicas in every stage, cut as evenly as possible."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.long_chain.feasible_intervals import FeasibleIntervals
from bapipe.planner.long_chain.relaxation import Path, Relaxation
from bapipe.planner.stages.equal_replicas import doublings, halves, pipeline_with_replicas
from bapipe.planner.stages.placements import StagePlacement


class BalancedCuts:
    """Cuts for given placements that make the longest stage as short as possible, found by bisection."""

    def __init__(self, problem: Problem, feasible: FeasibleIntervals, placements: Sequence[StagePlacement]) -> None:
        # The relaxation of a single pipeline: each placement has one successor.
        following = {placement: (successor,) for placement, successor in pairwise(placements)}
        self._relaxation = Relaxation(problem, feasible, placements[:1], lambda placement: following.get(placement, ()))
        # No stage is longer than the whole chain on the slowest placement.
        low_ns = 0
        self._min_stage_ns = max(int(feasible.microbatch_sums(placement)[-1]) for placement in placements)
        while self._min_stage_ns - low_ns > low_ns // 1000 + 1:  # to a thousandth
            middle_ns = (low_ns + self._min_stage_ns) // 2
            if self._relaxation.is_balanced(middle_ns):
                self._min_stage_ns = middle_ns
            else:
                low_ns = middle_ns

    def path(self, slack: float) -> Path | None:
        """Returns the path with the shortest round trip whose stages take at most `slack` times the minimum.

        None if there is none that fits.
        """
        is_balanced = self._relaxation.is_balanced(int(self._min_stage_ns * slack))
        return self._relaxation.best_path() if is_balanced else None


def uniform_pipelines(problem: Problem) -> Iterator[tuple[StagePlacement, ...]]:
    """Yields pipelines with equal numbers of replicas per stage, with the most stages, half as many, and so on.

    Those with the most replicas come first.
    """
    roots = sorted(problem.roots, key=lambda root: (-root.num_devices, root.bound_ns))
    root_of = {root.num_devices: root for root in reversed(roots)}  # for equal numbers, the smallest bound
    max_devices = max(root_of)
    for num_replicas in sorted({*doublings(max_devices), problem.num_microbatches}, reverse=True):
        max_stages = max_devices // num_replicas
        for num_stages in halves(max_stages):
            if num_replicas * num_stages in root_of:
                first = root_of[num_replicas * num_stages].first_placements
                placements = pipeline_with_replicas(first, num_replicas)
                if placements is not None:
                    yield placements
