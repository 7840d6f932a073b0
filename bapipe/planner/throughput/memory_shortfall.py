"""The plan for throughput that lacks the least memory, where none was found that fits.

It is found by bisection of the memory that is added to every device. If not all downsets are boundaries, a plan next to
it may lack less: the search is repeated among the downsets next to its cuts until that no longer helps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution
from bapipe.planner.throughput.loads import Boundaries

SHORTFALL_DIVISOR = 1000
"""Bisection ends within 1 / `SHORTFALL_DIVISOR` of the shortfall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A plan that would fit if every device had `num_bytes` more; 0 if it fits."""

    num_bytes: int
    solution: LoadSolution


def least_shortfall(
    search: LoadSearch, microbatch_size: int, deadline: Deadline, known: Shortfall | None = None
) -> Shortfall | None:
    """Returns the plan that lacks the least memory; None if the deadline passed before any was found.

    Whatever fits gives an upper bound of the shortfall, so that what is returned holds wherever the deadline passes.

    Args:
        known: a plan of another search, which is returned unless one of this search lacks clearly less.
    """
    if known is not None:
        # One search tells whether bisection can end below what is known.
        less = known.num_bytes - max(1, known.num_bytes // SHORTFALL_DIVISOR)
        found = _with_more(search, microbatch_size, max(0, less), deadline)
        return known if found is None else _bisected(search, microbatch_size, found, deadline)
    more = max(1, *search.limits)
    while True:
        found = _with_more(search, microbatch_size, more, deadline)
        if found is not None:
            return _bisected(search, microbatch_size, found, deadline)
        if deadline.is_over:
            return None
        more *= 2


def reduced(
    search: LoadSearch,
    shortfall: Shortfall,
    near_cuts: Callable[[LoadSolution], Boundaries],
    deadline: Deadline,
) -> Shortfall:
    """Returns a plan that lacks less, or the same, by searches among the downsets next to its cuts.

    One that lacks nothing is the best of the last search.
    """
    while shortfall.num_bytes and not deadline.is_over:
        near = replace(search, boundaries=near_cuts(shortfall.solution), has_all_downsets=False)
        size = shortfall.solution.microbatch_size
        found = _with_more(near, size, 0, deadline) or _bisected(near, size, shortfall, deadline)
        if found.num_bytes > shortfall.num_bytes - max(1, shortfall.num_bytes // SHORTFALL_DIVISOR):
            break
        shortfall = found
        if not found.num_bytes:
            best = near.solve(size, deadline=deadline)
            return replace(found, solution=best) if best.stages else found
    return shortfall


def _bisected(search: LoadSearch, microbatch_size: int, known: Shortfall, deadline: Deadline) -> Shortfall:
    short = 0
    while known.num_bytes - short > max(1, known.num_bytes // SHORTFALL_DIVISOR) and not deadline.is_over:
        middle = (known.num_bytes + short) // 2
        found = _with_more(search, microbatch_size, middle, deadline)
        if found is not None:
            known = found
        elif not deadline.is_over:
            short = middle
    return known


def _with_more(search: LoadSearch, microbatch_size: int, more: int, deadline: Deadline) -> Shortfall | None:
    with_more = replace(search, limits=tuple(limit + more for limit in search.limits))
    solution = with_more.solve_any(microbatch_size, deadline)
    return Shortfall(num_bytes=more, solution=solution) if solution.stages else None
