"""Plans for chains too long to search exactly: a bound from a relaxation, and the best of many plans near it.

Where a cut may be at many places, partial plans are too many to open. `within` decides for a step time whether any
plan may be so fast; halving finds the least such time, which no plan beats. Its own paths are plans to judge; others
are stages of equal numbers of devices, cut as evenly as may be and then, with stages a little longer, where transfers
are short. The best of them move their cuts as long as the judge says that it helps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from bapipe.planner.branch_and_bound.intervals import INF
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.problem import Problem, SearchResult
from bapipe.planner.branch_and_bound.search import best_first
from bapipe.planner.long_chain.feasible_intervals import FeasibleIntervals
from bapipe.planner.long_chain.relaxation import Path, Relaxation
from bapipe.progress import SearchProgress

MIN_BOUNDARIES = 300
"""From so many places where a chain may be cut this search is used."""

BOUND_PRECISION = 400
"""The bound is found to one part in so many."""

EVENT_DRIVEN_FACTOR = 20
"""How many times longer the judge takes event by event."""

BALANCE_SLACKS = (1.0, 1.01, 1.02, 1.04, 1.07, 1.12, 1.2)
"""By how much stages may exceed the most even cut, for shorter transfers."""

GOOD_ENOUGH = 1.01
"""Partial plans are opened too where the best plan exceeds the bound by more than this,"""

MAX_INTERVALS = 100_000_000
"""and the slots of all problems have no more runs of layers."""

NUM_CLIMBED = 4
"""Plans whose cuts are moved."""

CUT_MOVES = (32, 16, 8, 4, 3, 2, 1)
"""How many places a cut is moved at once."""


def is_long_chain(problems: Sequence[Problem]) -> bool:
    """Returns whether there are too many places to cut for partial plans to be opened one by one."""
    return any(problem.bounds.pieces.grid.num_places >= MIN_BOUNDARIES for problem in problems)


def solve_long_chain(
    problems: Sequence[Problem],
    *,
    max_actions: int = 12_000_000,
    stop: Callable[[], bool] = lambda: False,
    progress: SearchProgress | None = None,
) -> SearchResult | None:
    """Returns the best layout found and a bound on all, None where nothing fits.

    Args:
        max_actions: after how many actions the judge stops.
        stop: ends the search with the best layout so far.
    """
    search = _Search(problems, max_actions, stop, progress)
    search.construct_balanced()
    search.raise_bound()
    search.hill_climb()
    found = search.result()
    if found is None:
        if not search.may_fit:
            return None
        return best_first(problems, max_nodes=max_actions // 1000, stop=stop, progress=progress)
    if found.step_ns > GOOD_ENOUGH * found.lower_bound_ns and search.size <= MAX_INTERVALS and not stop():
        better = best_first(problems, max_nodes=max_actions // 10_000, stop=stop, progress=progress, known=found)
        assert better is not None
        return replace(better, lower_bound_ns=max(better.lower_bound_ns, found.lower_bound_ns))
    return found


class _Search:
    """The plans judged, and the bound so far."""

    def __init__(
        self, problems: Sequence[Problem], max_actions: int, stop: Callable[[], bool], progress: SearchProgress | None
    ) -> None:
        self.problems = [problem for problem in problems if problem.starts]
        self.max_actions, self.stop, self.progress = max_actions, stop, progress
        self.windows: dict[int, FeasibleIntervals] = {}
        for problem in self.problems:
            pieces = problem.bounds.pieces
            if id(pieces) not in self.windows:
                alike = [other for other in self.problems if other.bounds.pieces is pieces]
                self.windows[id(pieces)] = FeasibleIntervals(pieces, _first_placements(alike))
        self.low_ns = {key: int(windows.before[-1]) for key, windows in self.windows.items()}
        self.looked_at: set[int] = set()
        self.judged: dict[tuple[int, Path], int | None] = {}
        self.ranked: list[tuple[int, int, int, Path]] = []
        self.best_ns: int | None = None
        self.spent = 0
        self.may_fit = True
        self.size = 0

    @property
    def bound_ns(self) -> int:
        """A time that no step of any problem beats."""
        return min(self.low_ns.values(), default=0)

    @property
    def is_over(self) -> bool:
        if self.best_ns is None:
            return False
        return self.best_ns <= self.bound_ns or self.spent > self.max_actions or self.stop()

    def result(self) -> SearchResult | None:
        if not self.ranked:
            return None
        step_ns, _, i, (places, slots) = min(self.ranked, key=lambda plan: plan[:2])
        problem = self.problems[i]
        return SearchResult(
            problem=problem,
            layout=problem.layout(places, slots),
            step_ns=step_ns,
            lower_bound_ns=min(step_ns, self.bound_ns),
        )

    def step_ns(self, i: int, way: Path) -> int | None:
        """Returns what the judge says of a way through a problem, None where its stages do not fit."""
        if (i, way) not in self.judged:
            found = self.judged[i, way] = self._judge(self.problems[i], way)
            if found is not None:
                self.ranked.append((found, len(self.ranked), i, way))
                self.best_ns = found if self.best_ns is None else min(self.best_ns, found)
            if self.progress and self.best_ns is not None:
                self.progress(len(self.judged), self.best_ns, min(self.bound_ns, self.best_ns))
        return self.judged[i, way]

    def _judge(self, problem: Problem, way: Path) -> int | None:
        places, slots = way
        for slot, (start, stop) in zip(slots, pairwise(places), strict=True):
            if not problem.bounds.pieces.row(slot, start).fits[stop - start - 1]:
                return None
        layout = problem.layout(places, slots)
        if not problem.fits(layout):
            return None
        factor = 1 if problem.is_fast(layout) else EVENT_DRIVEN_FACTOR
        self.spent += 2 * len(slots) * problem.num_microbatches * factor
        return problem.step_ns(layout)

    def construct_balanced(self) -> None:
        """Judges stages of equal numbers of devices, the most promising ones cut in several ways."""
        evens: list[tuple[int, int, int, _BalancedCuts]] = []
        for turn in zip_longest(*(_uniform_pipelines(problem) for problem in self.problems)):
            for i, slots in enumerate(turn):
                if slots is None:
                    continue
                even = _BalancedCuts(self.problems[i], self._windows(self.problems[i]), slots)
                way = even.way(1.0)
                step_ns = None if way is None else self.step_ns(i, way)
                if step_ns is not None:
                    evens.append((step_ns, len(evens), i, even))
                if self.is_over:
                    return
        for _, _, i, even in sorted(evens, key=lambda e: e[:2])[:NUM_CLIMBED]:
            for slack in BALANCE_SLACKS[1:]:
                way = even.way(slack)
                if way is not None and not self.is_over:
                    self.step_ns(i, way)

    def _windows(self, problem: Problem) -> FeasibleIntervals:
        return self.windows[id(problem.bounds.pieces)]

    def raise_bound(self) -> None:
        """Raises the bound by halving, one micro-batch size after another, that of the best plan first."""
        best = min(self.ranked, key=lambda plan: plan[:2])[2] if self.ranked else 0
        first = id(self.problems[best].bounds.pieces)
        for key in sorted(self.low_ns, key=lambda key: key != first):
            if not self.is_over:
                numbers = [i for i, problem in enumerate(self.problems) if id(problem.bounds.pieces) == key]
                known = [low_ns for other, low_ns in self.low_ns.items() if other in self.looked_at]
                self._bisect_bound(key, numbers, min(known, default=None))
                self.looked_at.add(key)
                self.windows[key].forget()
        self.may_fit = self.best_ns is not None or self.bound_ns < INF >> 2

    def _bisect_bound(self, key: int, numbers: Sequence[int], enough_ns: int | None) -> None:
        """Raises the bound of some problems, to `enough_ns` at most, and judges the paths it meets."""
        relaxed = [(i, self._relaxed(self.problems[i])) for i in numbers]
        self.size += sum(within.num_runs for _, within in relaxed)

        def allowed(limit_ns: int) -> bool:
            place = next((place for place, (_, within) in enumerate(relaxed) if within.is_feasible(limit_ns)), None)
            if place is None:
                self.low_ns[key] = max(self.low_ns[key], limit_ns + 1)
                return False
            relaxed.insert(0, relaxed.pop(place))  # first the next time
            i, within = relaxed[0]
            way = within.best_path()
            if way is not None:
                self.step_ns(i, way)
            return True

        if self.best_ns is None and not allowed(INF >> 2):
            return
        if enough_ns is not None and not allowed(enough_ns - 1):
            return
        high_ns = enough_ns if enough_ns is not None else self.best_ns
        while not self.is_over and (
            high_ns is None or high_ns - self.low_ns[key] > self.low_ns[key] // BOUND_PRECISION
        ):
            limit_ns = 5 * self.low_ns[key] // 4 if high_ns is None else (self.low_ns[key] + high_ns) // 2
            if allowed(limit_ns):
                high_ns = limit_ns
        if self.best_ns is not None and not self.is_over:
            allowed(self.best_ns - 1)

    def _relaxed(self, problem: Problem) -> Relaxation:
        return Relaxation(problem, self._windows(problem), _first_placements([problem]), lambda slot: slot.next)

    def hill_climb(self) -> None:
        """Moves the cuts of the best plans for as long as that helps."""
        for _, _, i, way in sorted(self.ranked, key=lambda plan: plan[:2])[:NUM_CLIMBED]:
            helps = True
            while helps and not self.is_over:
                better = self._move_cuts(i, way)
                way, helps = better, better != way

    def _move_cuts(self, i: int, way: Path) -> Path:
        """Returns the way with every cut moved as far as helps at once."""
        places, slots = way
        best_ns = self.step_ns(i, way)
        reach = max(1, places[-1] // len(slots))
        for cut in range(1, len(slots)):
            for shift in [sign * size for size in CUT_MOVES if size <= reach for sign in (-1, 1)]:
                place = places[cut] + shift
                if places[cut - 1] < place < places[cut + 1] and not self.is_over:
                    moved = (*places[:cut], place, *places[cut + 1 :])
                    step_ns = self.step_ns(i, (moved, slots))
                    if step_ns is not None and best_ns is not None and step_ns < best_ns:
                        best_ns, places = step_ns, moved
        return places, slots


class _BalancedCuts:
    """Stages on given slots, cut as evenly as may be."""

    def __init__(self, problem: Problem, windows: FeasibleIntervals, slots: Sequence[StagePlacement]) -> None:
        after = {id(slot): (other,) for slot, other in pairwise(slots)}
        self._within = Relaxation(problem, windows, slots[:1], lambda slot: after.get(id(slot), ()))
        total = int(windows.times(slots[0])[-1])
        low, self._least_ns = total // len(slots) // 2, 2 * total
        while self._least_ns - low > low // 100 + 1:
            middle = (low + self._least_ns) // 2
            if self._within.is_balanced(middle):
                self._least_ns = middle
            else:
                low = middle

    def way(self, slack: float) -> Path | None:
        """Returns the way of the shortest transfers whose stages take at most so much longer; None where none fits."""
        return self._within.best_path() if self._within.is_balanced(int(self._least_ns * slack)) else None


def _uniform_pipelines(problem: Problem) -> Iterator[tuple[StagePlacement, ...]]:
    """Yields slots of equal numbers of devices, the most replicas first, on all devices, half of them, and so on."""
    starts = sorted(problem.starts, key=lambda start: (-start.devices, start.least_ns))
    by_devices = {start.devices: start for start in reversed(starts)}
    most = max(by_devices)
    sizes = {2**n for n in range(most.bit_length())} | {most, problem.num_microbatches}
    for size in sorted(sizes, reverse=True):
        for num_stages in sorted({(most // size) >> n for n in range(most.bit_length())} - {0}, reverse=True):
            if size * num_stages in by_devices:
                slots = _with_replicas(by_devices[size * num_stages].first, size)
                if slots is not None:
                    yield slots


def _with_replicas(first: tuple[StagePlacement, ...], size: int) -> tuple[StagePlacement, ...] | None:
    slots: list[StagePlacement] = []
    while not slots or not slots[-1].last:
        same = [slot for slot in (slots[-1].next if slots else first) if len(slot.devices) == size]
        if not same:
            return None
        slots.append(same[0])
    return tuple(slots)


def _first_placements(problems: Sequence[Problem]) -> list[StagePlacement]:
    return [slot for problem in problems for start in problem.starts for slot in start.first]
