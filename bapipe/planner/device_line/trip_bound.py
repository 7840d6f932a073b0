"""Decides whether any plan can be within a step time, by lower bounds on what precedes and what follows every stage.

A stage of some devices and layers is within a step time only if what precedes it, its own work and what follows it
together are. So two tables are filled alternately: for every number of first devices and every boundary, a lower bound
on what a micro-batch takes through the layers before the boundary on those devices, in stages that may be within the
step time (`trips_before.py`), and through the layers after it on the other devices (`trips_behind.py`). As more and
more stages are ruled out, both rise, until no plan is left or nothing changes (docs/many_devices.md).

More than the trip of a micro-batch counts before a stage. When the stage's last micro-batch is on its way back, others
follow it: an earlier stage runs several of them on one replica, and then sums its gradients. So there is a row of the
table for each of several numbers of micro-batches that follow. More counts after a stage, too: its first B comes after
F of several micro-batches, which arrive no faster than earlier stages run them. So there are rows of when the
micro-batches from some numbers on arrive, and of when gradients do: the first ones, and for GPipe those of each
micro-batch.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bapipe.hardware import num_cores
from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.compute.threads import in_waves
from bapipe.planner.device_line.behind import Behind, in_band
from bapipe.planner.device_line.furthest_prefixes import FurthestPrefixes
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.tracked import tracked_microbatches
from bapipe.planner.stages.intervals import IntArray

if TYPE_CHECKING:
    from bapipe.planner.device_line.early_waits import Waits
    from bapipe.planner.device_line.trip_tables import Scratch, Tables

NUM_STEPS = (3, 8, 16, 40)
"""Into how many equal steps the numbers of micro-batches before and after another one are divided. The first tables
have few steps, which rules out most stages in less time."""

FINE_STEPS = 160
"""The same for ranges of 1F1B that nothing else can divide any further."""

COARSE, COARSE_COUNTED, COARSE_OF_GPIPE = (0, 2), (0, 1), (2,)
"""Indices into `NUM_STEPS` of the tables before the last one. `COARSE_COUNTED`: if cuts are counted. `COARSE_OF_GPIPE`:
for GPipe with gradients distinguished, where more rows rule out much more."""

FIRST_COUNTED = (1, 24), (2, 48)
"""(Index into `NUM_STEPS`, number of tables) for the first passes with cuts counted. The last table is for all stages
after that many others or more, which takes less time and rules out most plans with many cuts. These passes are left out
if turns are distinguished, as all rows without cuts have then ruled out what fewer rows would."""

BY_TRIPS, BY_COARSE = -1, 0
"""Values of `num_rounds` for looks: by trips alone, or by all tables but the last, which take less time."""

LEFT = 0.75
"""The tables are filled again as long as at most this part of the boundaries of the pass before is left."""

MAX_TABLES, MAX_BYTES = 128, 5 * 2**27
"""The maximum number of tables by the number of stages before, and of their bytes. Four problems are asked about at
once."""

WORK_BEFORE, ROWS_OF_WORK, WORK_BEHIND, LATE_OF_WORK = 4, 12, 3, 8
"""About how many times as long as by trips alone it takes to try a stage with all limits: for tables before, plus one
per `ROWS_OF_WORK` of their rows; and for tables behind, plus one per `LATE_OF_WORK` of the rows of gradients."""

WIDE, NUM_ROUGH = 128, 1
"""With more than `WIDE` boundaries left per number of devices, passes whose index into `NUM_STEPS` is less than
`NUM_ROUGH` minimize sums separately (`trips_apart.py`)."""

TRIED_EACH = 3
"""How many begins and ends of stages are tried by trips alone, for each boundary that prefixes reach and each class:
2.6 to 3.2 with 512 devices and 100 to 2,000 layers."""

POSITIONS_AT_ONCE = 16
"""How many devices are handled between two checks of the deadline."""


class _Asked(NamedTuple):
    """A question.

    Attributes:
        limit: the step time in ns, plus what rounding may add to it.
        steps: the index into `NUM_STEPS` of the steps of micro-batches; None for trips alone.
        is_rough: whether sums are minimized separately: `trips_apart.py`.
        most_tables: the maximum number of tables by the number of stages before; 1 if that is not distinguished.
        max_threads: returns how many threads may be used now.
    """

    kind: PlanKind
    limit: float
    deadline: Deadline
    steps: int | None
    most_tables: int
    max_threads: Callable[[], int]
    is_rough: bool = False

    def cuts_of(self, known: Behind) -> tuple[int, int]:
        """Returns the minimum and maximum number of cuts of its plans that are not ruled out by `known`."""
        return max(self.kind.fewest_cuts, known.cuts[0]), min(self.kind.most_cuts, known.cuts[1])

    def max_tables(self, shape: tuple[int, ...]) -> int:
        """Returns the maximum number of tables of this shape; the last one is for that many stages or more."""
        return max(1, min(self.most_tables, MAX_BYTES // (8 * prod(shape))))


class _Filling(NamedTuple):
    """What fills a table.

    Attributes:
        fill: the compiled function for the stages that begin at one device.
        work: what trying a stage with all limits adds to `num_tried`.
        waits: how early and later stages wait for each other.
        may_be_last: whether stages may end at the last layer.
        positions: the devices before the stages, in the order in which they are added.
    """

    fill: Callable[..., int]
    work: int
    asked: _Asked
    waits: "Waits"
    tables: "Tables"
    may_be_last: bool
    positions: range


class TripBound:
    """The problem of a prefix bound with replicas, and 1F1B or GPipe.

    Attributes:
        num_tried: the work so far: begins and ends of stages that were tried by trips alone, or what takes as long.
    """

    def __init__(self, prefix: PrefixBound) -> None:
        self.prefix, self.num_tried = prefix, 0
        self._counts = threading.Lock()
        self._end = len(prefix.line.cuts) - 1
        steps = (*NUM_STEPS, FINE_STEPS) if prefix.tells_turns else NUM_STEPS
        self._tracked = tuple(tracked_microbatches(prefix, num_steps) for num_steps in steps)

    def look_work(self, kind: PlanKind, limit_ns: int, deadline: Deadline) -> int:
        """Estimates the work of a look at the plans of a kind within a step time by trips alone."""
        known = self._at_first(_Asked(kind, limit_ns * (1 + 1e-12), deadline, None, 1, lambda: 1))
        num_reached = 0 if known is None else known.num_left(1)
        return TRIED_EACH * num_reached * self.prefix.classes.fewest.size

    def within(
        self,
        kind: PlanKind,
        limit_ns: int,
        deadline: Deadline,
        num_rounds: int,
        earlier: Behind | None = None,
        *,
        counts_cuts: bool = False,
        is_fine: bool = False,
        max_threads: Callable[[], int] = lambda: 1,
        keep: Callable[[Behind], None] = lambda _: None,
    ) -> Behind | None:
        """Returns what is known of plans of a kind within a step time; None if there are none.

        Args:
            num_rounds: how many times at most the full tables are filled; or `BY_TRIPS`, `BY_COARSE`.
            earlier: what is known of a set of plans that includes these.
            counts_cuts: whether stages are distinguished by the number of cuts before them.
            is_fine: whether to use `FINE_STEPS`, if the prefix bound distinguishes turns.
            max_threads: returns how many threads may be used now; the result does not depend on it.
            keep: called with what is known after each time that the tables have been filled, as the next time may take
                too long.
        """
        finest = len(NUM_STEPS) - 1 + (is_fine and self.prefix.tells_turns)
        asked = _Asked(kind, limit_ns * (1 + 1e-12), deadline, finest, 1, max_threads)
        known = self._at_first(asked) if earlier is None else earlier
        if known is not None and known.limit > asked.limit:
            known = known._replace(num_passes=0)
        if known is not None and len(known.tables) == 1:
            # First tables that take less time, which rule out most stages.
            coarse: tuple[int, ...] = COARSE_COUNTED if counts_cuts else COARSE
            coarse = COARSE_OF_GPIPE if self.prefix.tells_gradients else coarse
            passes = (None, *coarse) if num_rounds != BY_TRIPS else (None,)
            known = self._fill_each(known, (asked._replace(steps=each) for each in passes[known.num_passes :]), keep)
        if num_rounds in (BY_TRIPS, BY_COARSE):
            return known
        if not counts_cuts:
            return self._fill_by_turns(known, repeat(asked, num_rounds), keep)
        if known is not None and len(known.tables) == 1 and not self.prefix.tells_turns:
            counted = (asked._replace(steps=each, most_tables=tables) for each, tables in FIRST_COUNTED)
            known = self._fill_each(known, counted, keep)
        numbers = (min(MAX_TABLES, FIRST_COUNTED[-1][1] << turn) for turn in range(num_rounds))
        return self._fill_by_turns(known, (asked._replace(most_tables=tables) for tables in numbers), keep)

    def _fill_each(
        self, known: Behind | None, questions: Iterable[_Asked], keep: Callable[[Behind], None]
    ) -> Behind | None:
        """Fills the tables once for each question."""
        num_wide = WIDE * self.prefix.num_devices
        for question in questions:
            if known is None:
                return None
            may_be_rough = question.steps is not None and question.steps < NUM_ROUGH and len(known.tables) == 1
            asked = question._replace(is_rough=may_be_rough and known.num_left(1) > num_wide)
            before = self._fill_before(asked, known)
            known = None if before is None else self._fill_behind(asked, known, before)
            if known is not None:
                known = known._replace(num_passes=known.num_passes + 1)
                keep(known)
        return known

    def _fill_by_turns(
        self, known: Behind | None, questions: Iterable[_Asked], keep: Callable[[Behind], None]
    ) -> Behind | None:
        """Fills the tables once for each question until no plan is left, or little changes."""
        for asked in questions:
            before_it, known = known, self._fill_each(known, [asked], keep)
            if known is None or before_it is None:
                return None
            # The last table stands for more stages if there are fewer tables.
            num_tables = max(1, min(len(known.tables), len(before_it.tables)) - 1)
            if known.num_left(num_tables) > LEFT * before_it.num_left(num_tables):
                break
        return known

    def _at_first(self, asked: _Asked) -> Behind | None:
        """Returns what is known from the furthest prefixes, and from the fastest devices after each position."""
        prefix = self.prefix
        prefixes = FurthestPrefixes(prefix.programme, asked.kind, int(asked.limit), counts_cuts=False)
        position = prefixes.find(asked.deadline)
        if position is None:
            return None
        trip, boundaries = prefix.least.trip, np.arange(len(prefix.line.cuts))
        furthest = np.where(np.arange(prefix.num_devices + 1) < position, prefixes.furthest[0, :, 0], boundaries[-1])
        fastest = np.append(1 / np.maximum.accumulate(prefix.speeds[::-1])[::-1], 0.0)
        trips = np.outer(fastest, trip[-1] - trip)
        trips[(boundaries > furthest[:, None]) | (boundaries < prefixes.first)] = np.inf
        gradients = np.where(np.isinf(trips), np.inf, 0.0)
        lows, tables = np.zeros(len(trips), dtype=np.int64), (np.stack([trips, gradients, gradients]),)
        none = np.empty((*trips.shape, 0))
        return in_band(Behind(asked.limit, asked.kind[:2], lows, tables, (none,), np.arange(0)))

    def _fill_before(self, asked: _Asked, known: Behind) -> list[Floats] | None:
        """Fills the tables before; returns them by the number of stages before, None if no plan is left."""
        from bapipe.planner.device_line.trip_tables import Tables
        from bapipe.planner.device_line.trips_before import fill_before

        tracked, waits = self._tracked[asked.steps or 0], self._waits(asked, known)
        num_rows = 2 + (tracked.behind.size + tracked.before.size) * (asked.steps is not None)
        shape, numbers = (*known.tables[0].shape[1:], num_rows), self._numbers(asked)
        max_tables, (fewest, most) = asked.max_tables(shape), asked.cuts_of(known)
        before, are_reached = [np.full(shape, np.inf)], [False] * (most + 1)
        before[0][0, 0] = 0.0  # `lows` begins with 0
        every, work = (0, self.prefix.classes.fewest.size), WORK_BEFORE + num_rows // ROWS_OF_WORK

        def fill(c: int, begin: Callable[[int], None], deadline: Deadline) -> bool:
            if len(before) < max_tables:
                before.append(np.full(shape, np.inf))
            is_rest = c == max_tables - 1
            behind = known.behind_stages(c + 1, or_more=is_rest)
            gradients = known.gradients_behind(c + 1, numbers, or_more=is_rest)
            ends = before[min(c + 1, max_tables - 1)]
            tables = Tables(known.lows, before[c], ends, behind, behind, gradients, gradients)
            may_be_last = is_rest or c >= fewest
            filling = _Filling(fill_before, work, asked, waits, tables, may_be_last, range(self.prefix.num_devices + 1))
            if is_rest:
                begin(len(filling.positions))  # the row before adds to this table until it has ended
                parts = self._parts(asked)
                self._run_parts(filling, parts, deadline, np.full(shape, np.inf) if len(parts) > 1 else None)
            else:
                self._run(filling, every, begin, deadline)
            arrived = tables.before_ends[:, :, 0]
            at_end = known.at_boundary(self._end, arrived)
            are_reached[c] = may_be_last and bool(np.isfinite(at_end).any())
            return not is_rest and bool(np.isfinite(arrived).sum() > np.isfinite(at_end).sum())

        num_tables = in_waves(fill, min(most + 1, max_tables), asked.deadline, asked.max_threads())
        return before[: num_tables + 1] if any(are_reached) else None

    def _fill_behind(self, asked: _Asked, known: Behind, before: Sequence[Floats]) -> Behind | None:
        """Fills the tables behind; None if no plan is left."""
        from bapipe.planner.device_line.trip_tables import Tables
        from bapipe.planner.device_line.trips_behind import fill_behind

        (fewest, most), waits = asked.cuts_of(known), self._waits(asked, known)
        behind, cuts = [np.full_like(known.tables[0], np.inf) for _ in before], []
        numbers = self._numbers(asked)
        gradients = [np.full((*table.shape[1:], numbers.size), np.inf) for table in behind]
        rest = asked.max_tables(before[0].shape) - 1
        for num_stages, table in enumerate(behind):
            most_here = most if num_stages == rest else num_stages - 1
            if fewest <= most_here <= most:
                is_end = np.isfinite(known.at_boundary(self._end, before[num_stages][:, :, 0]))
                table[:, is_end, (self._end - known.lows)[is_end]] = 0.0
                gradients[num_stages][is_end, (self._end - known.lows)[is_end]] = 0.0
                cuts += [max(num_stages - 1, fewest), most_here] * bool(is_end.any())
        last, every = min(rest, len(before) - 1), (0, self.prefix.classes.fewest.size)

        def fill(row: int, begin: Callable[[int], None], deadline: Deadline) -> bool:
            c = last - row
            more = min(c + 1, len(behind) - 1)
            tables = Tables(known.lows, before[c], before[c], behind[c], behind[more], gradients[c], gradients[more])
            may_be_last = c == rest or fewest <= c <= most
            positions = range(self.prefix.num_devices - 1, -1, -1)
            filling = _Filling(
                fill_behind, WORK_BEHIND + numbers.size // LATE_OF_WORK, asked, waits, tables, may_be_last, positions
            )
            if c == rest:
                self._run_parts(filling, self._parts(asked)[::-1], deadline)
            else:
                self._run(filling, every, begin, deadline)
            return c > 0

        in_waves(fill, last + 1, asked.deadline, asked.max_threads())
        if np.isinf(behind[0][0, 0, 0]):
            return None
        cuts_left = min(cuts), max(cuts)
        found = known._replace(limit=asked.limit, cuts=cuts_left, tables=tuple(behind))
        return in_band(found._replace(gradients=tuple(gradients), numbers=numbers))

    def _run_parts(
        self,
        filling: _Filling,
        parts: Sequence[tuple[int, int]],
        deadline: Deadline,
        far_ends: Floats | None = None,
    ) -> None:
        """Fills a table in which stages follow one another, with each part of the classes in a thread of its own.

        Args:
            far_ends: the table to which the second part adds at the ends of stages, if that is not the table of the
                begins: two threads must not write to one number at the same time.
        """

        def run(part: int, begin: Callable[[int], None], deadline: Deadline) -> bool:
            own = filling
            if part > 0 and far_ends is not None:
                own = filling._replace(tables=filling.tables._replace(before_ends=far_ends))
            self._run(own, parts[part], begin, deadline, far_ends if part == 0 else None)
            return True

        in_waves(run, len(parts), deadline, len(parts), most_ahead=1)

    def _run(
        self,
        filling: _Filling,
        classes: tuple[int, int],
        begin: Callable[[int], None],
        deadline: Deadline,
        far_ends: Floats | None = None,
    ) -> None:
        """Fills a table with the stages of some classes, each part of the devices once `begin` allows it.

        Args:
            far_ends: a second table of ends, which is merged in before stages begin at a device.
        """
        fill, work, asked, waits, tables, may_be_last, positions = filling
        kind, limit, is_full = asked.kind, asked.limit, asked.steps is not None
        tracked = self._tracked[asked.steps or 0]._replace(is_rough=asked.is_rough)
        num_levels = tracked.num_levels if is_full else 1
        problem, scratch = (
            self.prefix.programme,
            self._scratch(tables.before_begins.shape[2], tables.gradient_begins.shape[2], num_levels),
        )
        num_tried = 0
        for number in range(-(-len(positions) // POSITIONS_AT_ONCE)):
            begin(number)
            deadline.check()
            for p in positions[number * POSITIONS_AT_ONCE : (number + 1) * POSITIONS_AT_ONCE]:
                if far_ends is not None:
                    np.minimum(tables.before_begins[p], far_ends[p], out=tables.before_begins[p])
                num_tried += fill(
                    problem, tracked, kind, waits, limit, tables, scratch, is_full, may_be_last, *classes, p
                )
        with self._counts:
            self.num_tried += num_tried * (1 if asked.steps is None else work)

    def _parts(self, asked: _Asked) -> list[tuple[int, int]]:
        """Divides the classes into parts that fill a table at the same time: stages of few and of many devices.

        The latter end so far away that none ends where a stage of the former begins at that time.
        """
        fewest = self.prefix.classes.fewest
        many = max(int(np.searchsorted(fewest, 2 * POSITIONS_AT_ONCE)), fewest.size // 2)
        if many == fewest.size or min(asked.max_threads(), num_cores()) < 2:
            return [(0, fewest.size)]
        return [(0, many), (many, fewest.size)]

    def _waits(self, asked: _Asked, known: Behind) -> "Waits":
        from bapipe.planner.device_line.early_waits import early_waits

        return early_waits(self.prefix.programme, asked.kind, known.first_ends(self._end))

    def _numbers(self, asked: _Asked) -> IntArray:
        """Returns the first micro-batch of each range whose gradients are not distinguished."""
        tracked = self._tracked[asked.steps or 0]
        return tracked.before[: tracked.num_gradients * (asked.steps is not None)]

    def _scratch(self, num_rows: int, num_gradients: int, num_levels: int) -> "Scratch":
        from bapipe.planner.device_line.trip_limits import NUM_KNOWN
        from bapipe.planner.device_line.trip_sums import NUM_SUMS, NUM_WEIGHTS
        from bapipe.planner.device_line.trip_tables import Scratch

        num = self._end + 1
        starts, positions = np.empty((2, num), dtype=np.int64)
        costs, around, gradients, values = np.empty((4, num))
        return Scratch(
            known=np.zeros((NUM_KNOWN, num)),
            slopes=np.empty((3, NUM_KNOWN)),
            rest=np.empty((4, num)),
            starts=starts,
            then=np.empty((num, num_rows)),
            levels=np.empty((num, num_rows * num_levels)),
            late=np.empty((num, num_gradients * num_levels)),
            then_late=np.empty((num, num_gradients)),
            apart=np.empty((num, 2 * num_rows)),
            least_behind=np.empty(2 * num_rows),
            found=np.empty(num_rows),
            found_late=np.empty(num_gradients),
            speeds=np.empty(self.prefix.num_devices),
            row_ns=np.empty(num_rows),
            rows_ns=np.empty(num_rows),
            forwards=np.empty((2, num_gradients)),
            costs=costs,
            around=around,
            gradients=gradients,
            values=values,
            positions=positions,
            weights=np.empty((NUM_SUMS, NUM_WEIGHTS)),
            begin_sums=np.empty((NUM_SUMS, num)),
            end_sums=np.empty((NUM_SUMS, num)),
        )
