"""Ranges of plans, each with its own lower bound, and how a range is divided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import numpy as np

from bapipe.planner.device_line.behind import Behind
from bapipe.planner.device_line.line import TimedPlan
from bapipe.planner.device_line.plan_kind import ANY_END, PlanKind
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.ring_bound import RingBound
from bapipe.planner.device_line.trip_bound import TripBound
from bapipe.planner.stages.intervals import IntArray

WIDTH = 1.25
"""Wide ranges of numbers of cuts end at this multiple of their first number."""

LEAST = 1 / 150
"""A range is not divided by a property that changes a step by no more than this part."""

LITTLE = 1 / 20
"""Cuts are counted if neither their number nor the replicas of the last stage change a step by more than this part."""

MANY_CUTS, MIN_CUTS, MIN_CUTS_OF_GPIPE = 3, 1 / 500, 1 / 50
"""Plans of interest have at most `MANY_CUTS` times as many cuts as the best plan has stages. The tables count cuts if
these change a step by more than `MIN_CUTS`, or for GPipe, where counting rules out less, `MIN_CUTS_OF_GPIPE`."""

SMALL, UNCOUNTED = 1.1, 1 / 100
"""GPipe: ranges of the replicas of the last stage whose end is at most `SMALL` times their begin are not divided. If
transfers are short and the tables would count cuts next, which takes long, ranges are first divided by these replicas
until they change a step by no more than `UNCOUNTED`."""

OF_REPLICAS, LEAST_OF_FIRST, FEW_REPLICAS = 0.03, 1 / 500, 0.015
"""1F1B: a relative difference x in the replicas of the first stage changes a step by `OF_REPLICAS` x. Ranges are not
divided by them if that is at most `LEAST_OF_FIRST`, nor by the ends of that stage if cuts change more; if it is above
`FEW_REPLICAS`, they are divided before cuts are counted."""

OF_ENDS = 0.05
"""The same factor for the boundary at which the first stage ends."""

EARLY = 16
"""The end of the first stage matters only if it has at most 1/`EARLY` of the devices."""

AT_ONCE = 8
"""Where turns are distinguished, into how many ranges the ends of the first stage are divided."""

MIDDLE = 0.75
"""Where ranges of the ends of the first stage are divided otherwise, as most of the work is for later ends."""


@dataclass(slots=True)
class Known:
    """What `trip_bound.py` has found for the plans within a goal; `behind` is None once dropped to save memory."""

    goal_ns: int
    behind: Behind | None


@dataclass(kw_only=True, eq=False)
class PlanRange:
    """A range of the plans of a problem. All pairs are a minimum and a maximum.

    Attributes:
        cuts: the number of cuts.
        last_replicas: the number of replicas of the last stage.
        first_replicas: the number of replicas of the first stage, if that matters.
        first_ends: the boundary at which the first stage ends, if that matters.
        counts_cuts: whether prefixes with different numbers of cuts are distinguished.
        is_fine: whether delays, or micro-batches before and after others, are distinguished more finely.
        is_likely: whether the relaxation had a plan within the last goal, and so may have one within the next.
        open_ns: the last goal that it was asked about, if the relaxation has a plan within it.
        trips: the bound of `trip_bound.py`, if it is asked instead of `problem`.
        known: what `trips` has found for some goals, the lowest one first.
        bound_ns: a lower bound on the step time of these plans.
    """

    problem: RingBound
    trips: TripBound | None
    cuts: tuple[int, int]
    last_replicas: tuple[int, int]
    first_replicas: tuple[int, int]
    bound_ns: int
    first_ends: tuple[int, int] = (0, ANY_END)
    counts_cuts: bool = False
    is_fine: bool = False
    is_likely: bool = False
    open_ns: int = 0
    known: tuple[Known, ...] = ()

    @property
    def kind(self) -> PlanKind:
        """The same limits, as the bounds take them."""
        return PlanKind(*self.cuts, *self.last_replicas, *self.first_replicas, *self.first_ends)

    def known_within(self, goal_ns: int) -> Behind | None:
        """Returns what is known of its plans within a goal, None if nothing is."""
        behinds = (each.behind for each in self.known if goal_ns <= each.goal_ns)
        return next((behind for behind in behinds if behind is not None), None)

    def open_firsts(self) -> IntArray:
        """Returns the replicas that the first stage may still have within the last goal; empty if unknown."""
        behind, (fewest, most) = self.known_within(self.open_ns), self.first_replicas
        numbers = np.arange(0) if behind is None else behind.firsts()
        return numbers[(fewest <= numbers) & (numbers <= most)]

    def open_ends(self) -> IntArray:
        """Returns the boundaries at which the first stage may still end within the last goal.

        For ranges with a single number of replicas of that stage; empty if unknown.
        """
        behind, (first, last) = self.known_within(self.open_ns), self.first_ends
        ends = np.arange(0) if behind is None else behind.ends_of_first(self.first_replicas[0])
        return ends[(first <= ends) & (ends <= last)]

    def of_cuts(self, best: TimedPlan) -> float:
        """Returns by which part of the best step plans of interest can differ because of their numbers of cuts."""
        (fewest, most), prefix = self.cuts, self.problem.prefix
        if self.trips is not None:
            most = min(most, max(fewest, MANY_CUTS * len(best.plan.counts)))
        return _num_trips(prefix) * (prefix.round_trip_ns(most) - prefix.round_trip_ns(fewest)) / best.step_ns


def wide_ranges(whole: PlanRange) -> list[PlanRange]:
    """Divides a range into ranges of similar numbers of cuts."""
    ranges, (fewest, most) = [], whole.cuts
    while fewest <= most:
        end = min(most, max(fewest, int(fewest * WIDTH)))
        ranges.append(replace(whole, cuts=(fewest, end)))
        fewest = end + 1
    return ranges


def parts_of(whole: PlanRange, best: TimedPlan) -> list[PlanRange]:
    """Divides a range by the property that changes the best step the most.

    If none changes it much, returns the range with cuts counted, then with more levels of delays; at last nothing.
    """
    find = _parts_by_tables if whole.trips is not None else _parts_by_prefixes
    return [replace(part, open_ns=0) for part in find(whole, best)]


def by_last_stage(whole: PlanRange) -> list[PlanRange]:
    """Divides a range by the replicas of the last stage, as far as those matter."""
    if _of_last(whole) <= LEAST:
        return [replace(whole, counts_cuts=True)]
    halves = (replace(whole, last_replicas=half) for half in _halves(*whole.last_replicas))
    return [part for half in halves for part in by_last_stage(half)]


def _parts_by_tables(whole: PlanRange, best: TimedPlan) -> Sequence[PlanRange]:
    prefix, counts_cuts = whole.problem.prefix, whole.counts_cuts
    if prefix.tells_turns:
        return _parts_by_turns(whole)
    of_cuts, of_first, of_last = whole.of_cuts(best), _of_first(whole), _of_last(whole)
    is_counted_later = not counts_cuts and _of_transfers(whole, best) < LITTLE
    enough = min(of_cuts, UNCOUNTED) if is_counted_later else of_cuts
    if of_last > max(0.0 if prefix.has_many_alike else enough, LEAST):
        return [replace(whole, last_replicas=half) for half in _halves(*whole.last_replicas)]
    if of_first > (max(of_cuts, LEAST_OF_FIRST) if counts_cuts else FEW_REPLICAS):
        return [replace(whole, first_replicas=half) for half in _halves(*whole.first_replicas)]
    if not counts_cuts:
        is_less = prefix.are_forwards_first and not prefix.has_many_alike
        matters = of_cuts > (MIN_CUTS_OF_GPIPE if is_less else MIN_CUTS)
        return [replace(whole, counts_cuts=True)] * matters
    if of_cuts > LEAST and whole.cuts[0] < whole.cuts[1]:
        return [replace(whole, cuts=half) for half in _halves(*whole.cuts)]
    return []


def _parts_by_turns(whole: PlanRange) -> Sequence[PlanRange]:
    """Divides a range by what turns depend on most: replicas of the first stage, its end, then cuts; then more rows.

    A single number of replicas and of layers makes much of a difference, and asking about one takes a small part of the
    time that counting cuts does. As all open parts are asked about in the end, several halvings are done at once.
    """
    (few, most), (first, last) = whole.first_replicas, whole.first_ends
    numbers = whole.open_firsts()
    if few < most and numbers.size > 0:
        low, high = int(numbers[0]), int(numbers[-1])
        closed = [each for each in ((few, low - 1), (high + 1, most)) if each[0] <= each[1]]
        refuted = [replace(whole, first_replicas=each, bound_ns=whole.open_ns + 1) for each in closed]
        return [*refuted, *(replace(whole, first_replicas=each) for each in _eighths(low, high))]
    if few < most:
        return [replace(whole, first_replicas=half) for half in _halves(few, most)]
    ends = whole.open_ends()
    if ends.size > 1:
        step = -(-ends.size // AT_ONCE)
        begins = [first, *ends[step::step].tolist()]
        parts = zip(begins, [*(begin - 1 for begin in begins[1:]), last], strict=True)
        return [replace(whole, first_ends=part) for part in parts]
    if not whole.counts_cuts:
        return [replace(whole, counts_cuts=True)]
    if whole.cuts[0] < whole.cuts[1]:
        return [replace(whole, cuts=half) for half in _halves(*whole.cuts)]
    return [] if whole.is_fine else [replace(whole, is_fine=True)]


def _parts_by_prefixes(whole: PlanRange, best: TimedPlan) -> Sequence[PlanRange]:
    (fewest, most), counts_cuts = whole.cuts, whole.counts_cuts
    of_cuts, of_first, of_last = whole.of_cuts(best), _of_first(whole), _of_last(whole)
    if not counts_cuts and of_first > FEW_REPLICAS and _of_transfers(whole, best) < LITTLE:
        return [replace(whole, first_replicas=half) for half in _halves(*whole.first_replicas)]
    if not counts_cuts and max(of_cuts, of_last) < LITTLE:
        return [replace(whole, counts_cuts=True)]
    if of_last > max(of_cuts, LEAST):
        return [replace(whole, last_replicas=half) for half in _halves(*whole.last_replicas)]
    if counts_cuts and of_first > max(of_cuts, LEAST_OF_FIRST):
        return [replace(whole, first_replicas=half) for half in _halves(*whole.first_replicas)]
    if counts_cuts and of_cuts <= LEAST_OF_FIRST:
        begin, end = _ends(whole, best)
        if OF_ENDS * (end - begin) > LEAST * end:
            middle = max(int(end * MIDDLE), (begin + end) // 2)
            return [replace(whole, first_ends=part) for part in ((begin, middle), (middle + 1, end))]
        if not whole.is_fine:
            return [replace(whole, is_fine=True)]
    if fewest < most:
        middle = (fewest + most) // 2
        return [replace(whole, cuts=half) for half in ((fewest, middle), (middle + 1, most))]
    return [] if whole.is_fine else [replace(whole, is_fine=True, counts_cuts=True)]


def _of_last(whole: PlanRange) -> float:
    """Returns by which part of a step GPipe's plans can differ because of the replicas of the last stage.

    That is by the F that do not run during a round trip, see `stage_limits.py`, which are a third of the work.
    """
    fewest, most = whole.last_replicas
    is_small = most <= SMALL * fewest or not whole.problem.prefix.are_forwards_first
    return 0.0 if is_small else (most - fewest) / whole.problem.prefix.num_microbatches / 3


def _of_first(whole: PlanRange) -> float:
    """Returns the same for 1F1B and the replicas of the first stage: see `early_waits.py`."""
    fewest, most = whole.first_replicas
    return OF_REPLICAS * (most - fewest) / most if whole.problem.prefix.has_cycles else 0.0


def _of_transfers(whole: PlanRange, best: TimedPlan) -> float:
    """Returns the transfers over the best plan's cuts, in all consecutive round trips, as a part of its step."""
    prefix = whole.problem.prefix
    return _num_trips(prefix) * prefix.round_trip_ns(len(best.plan.counts) - 1) / best.step_ns


def _num_trips(prefix: PrefixBound) -> float:
    """Returns the number of consecutive round trips in a step."""
    return 1 + prefix.num_microbatches / prefix.num_devices if prefix.has_cycles else 1.0


def _ends(whole: PlanRange, best: TimedPlan) -> tuple[int, int]:
    """Returns the boundaries between which a first stage within the best step ends; (0, 0) if they do not matter."""
    prefix, (first, last), replicas = whole.problem.prefix, whole.first_ends, whole.first_replicas[1]
    if not prefix.has_cycles or replicas * EARLY > prefix.num_devices:
        return 0, 0
    trip = prefix.least.trip * -(-prefix.num_microbatches // replicas) / prefix.max_speed
    return first, min(last, len(trip) - 1, int(np.searchsorted(trip, best.step_ns, side="right")))


def _eighths(low: int, high: int) -> list[tuple[int, int]]:
    """Divides a range into eight parts, or into single numbers if it has fewer."""
    parts = [(low, high)]
    for _ in range(3):
        parts = [half for part in parts for half in (_halves(*part) if part[0] < part[1] else [part])]
    return parts


def _halves(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Divides a range into two, at the geometric mean of its ends."""
    middle = min(isqrt(max(low, 1) * high), high - 1)
    yield low, middle
    yield middle + 1, high
