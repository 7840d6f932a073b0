"""Judges every cut of every problem. The oracle of the other searches; for at most some 15 layers."""

from collections.abc import Sequence
from itertools import combinations

from bapipe.search.problem import Found, Problem


def exhaustive(problems: Sequence[Problem]) -> Found | None:
    """Returns the fastest cuts whose judged memory fits; None where nothing fits. O(C(layers, stages)) judgements."""
    best: Found | None = None
    for problem in problems:
        for inner in combinations(problem.legal_cuts, problem.num_stages - 1):
            cuts = (0, *inner, problem.num_layers)
            timeline = problem.judge(cuts)
            peaks = [timeline.memory[rank].total for rank in problem.ranks]
            if any(peak > limit for peak, limit in zip(peaks, problem.memory_bytes, strict=True)):
                continue
            if best is None or timeline.step_ns < best.step_ns:
                best = Found(problem=problem, cuts=cuts, step_ns=timeline.step_ns, lower_bound_ns=timeline.step_ns)
    return best
