"""Exact search: completes partial plans in the order of a lower bound until the bound meets the best plan found."""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from bapipe.search.bounds import Bounds, Prefix
from bapipe.search.problem import Found, Problem

SLOW = 50
"""How many partial plans could be opened in the time of a plan judged event by event."""

Progress = Callable[[int, int, int], None]
"""(plans judged, best step time, lower bound), both in nanoseconds."""


def best_first(problems: Sequence[Problem], *, limit: int = 200_000, progress: Progress | None = None) -> Found | None:
    """Returns the fastest cuts over all problems, None where nothing was found that fits.

    The bound never exceeds the judged time, so the first moment it reaches the best plan's time proves that plan
    optimal. After `limit` partial plans the best one so far is returned with the bound reached; a plan that takes the
    judge's slow clockwork counts as `SLOW` of them.
    """
    bounds: dict[int, Bounds] = {}  # made when the problem's turn comes
    best: Found | None = None
    queue: list[tuple[float, int, tuple[int, ...], Prefix | None]] = [
        (problem.least_ns, i, (), None) for i, problem in enumerate(problems)
    ]
    heapify(queue)
    spent = judged = 0
    while queue and queue[0][0] < (best.step_ns if best else inf) and spent < limit:
        bound_ns, i, _, prefix = heappop(queue)
        spent += 1
        if prefix is None:
            bounds[i] = Bounds(problems[i])
            if (cuts := _descend(bounds[i])) is not None:
                best = _better(best, problems[i], cuts)
                heappush(queue, (bounds[i].bound_ns(bounds[i].start()), i, (0,), bounds[i].start()))
            continue
        if len(prefix.cuts) > problems[i].num_stages:
            best = _better(best, problems[i], prefix.cuts)
            spent += 0 if problems[i].fast else SLOW
            judged += 1
            if progress and best:
                progress(judged, best.step_ns, int(bound_ns))
            continue
        for z in bounds[i].ends(len(prefix.cuts) - 1, prefix.cuts[-1]):
            longer = bounds[i].extend(prefix, z)
            if longer is None:
                continue
            entry_ns = bounds[i].bound_ns(longer)
            if entry_ns < (best.step_ns if best else inf):
                heappush(queue, (entry_ns, i, longer.cuts, longer))
    if best is None:
        return None
    lower = best.step_ns if not queue else int(min(best.step_ns, queue[0][0]))
    return Found(problem=best.problem, cuts=best.cuts, step_ns=best.step_ns, lower_bound_ns=lower)


def _descend(bounds: Bounds) -> tuple[int, ...] | None:
    """Returns the cuts reached by always taking the stage of least bound; a good first plan."""
    prefix = bounds.start()
    while len(prefix.cuts) <= bounds.problem.num_stages:
        step: Prefix | None = None
        for z in bounds.ends(len(prefix.cuts) - 1, prefix.cuts[-1]):
            longer = bounds.extend(prefix, z)
            if longer is not None and bounds.bound_ns(longer) < (bounds.bound_ns(step) if step else inf):
                step = longer
        if step is None:
            return None
        prefix = step
    return prefix.cuts


def _better(best: Found | None, problem: Problem, cuts: tuple[int, ...]) -> Found | None:
    if problem.looped and not problem.fits(cuts):  # the bounds look at one stage of a device at a time
        return best
    step_ns = problem.step_ns(cuts)
    if best is not None and step_ns >= best.step_ns:
        return best
    return Found(problem=problem, cuts=cuts, step_ns=step_ns, lower_bound_ns=step_ns)
