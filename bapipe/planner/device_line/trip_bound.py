"""Decides whether any plan can be within a step time, by what a micro-batch takes before and behind every stage.

A stage of some devices and layers is within a step time only if what comes before it, its own work and what comes
behind it are. So two tables are filled by turns: for every number of first devices and every boundary, what a
micro-batch takes at least through the layers before it on those devices, in stages that may be within the step time
(`trips_before.py`), and through the layers behind it on the others (`trips_behind.py`). Both rise, as fewer and fewer
stages may be, until no plan is left, or nothing changes (docs/algorithm.md, Many devices).

Before a stage more counts than the trip of a micro-batch. When the last one of the stage is on its way back, others are
behind it: an earlier stage runs several of them on one replica, and then sums its gradients. So there is a table for
each of some numbers of others behind a micro-batch.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.furthest_prefixes import FurthestPrefixes
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.replica_weights import FloatArray

if TYPE_CHECKING:
    from bapipe.planner.device_line.trip_limits import Late
    from bapipe.planner.device_line.trip_tables import Tables

NUM_LATE = 8
"""Numbers of micro-batches behind another one that are told apart, in equal proportions."""

LEFT = 0.97
"""The tables are filled as long as no more than this part of the boundaries before is left."""

POSITIONS_AT_ONCE = 16
"""Devices between two looks at the deadline."""


class Behind(NamedTuple):
    """What is known of the layers behind boundaries within a step time, see `Tables`."""

    trips: FloatArray
    cuts: NDArray[np.int32]


class TripBound:
    """The problem of a prefix bound with replicas, and 1F1B or GPipe.

    Attributes:
        num_tried: ends and begins of stages so far: the work.
    """

    def __init__(self, prefix: PrefixBound) -> None:
        self.prefix, self.num_tried = prefix, 0
        self._late = _late(prefix)

    def behind(
        self, kind: PlanKind, limit_ns: int, deadline: Deadline, num_rounds: int, earlier: Behind | None = None
    ) -> Behind | None:
        """Returns what is known of plans of a kind within a step time; None if there are none.

        Args:
            num_rounds: how often the tables are filled, at most, with what follows behind micro-batches.
            earlier: what is known of plans among which these are.
        """
        from bapipe.planner.device_line.trip_tables import Tables

        known = self._at_first(kind, limit_ns, deadline) if earlier is None else earlier
        if known is None:
            return None
        before = np.empty((2, 1 + self._late.numbers.size, *known.cuts.shape))
        tables = Tables(before, known.trips.copy(), np.empty_like(known.cuts), known.cuts.copy())
        if (earlier is None or num_rounds == 0) and not self._fill(tables, kind, limit_ns, 0, deadline):
            return None
        left = np.inf
        for _ in range(num_rounds):
            if not self._fill(tables, kind, limit_ns, self._late.numbers.size, deadline):
                return None
            before_it, left = left, float(np.isfinite(tables.behind[0]).mean())
            if left > LEFT * before_it:
                break
        return Behind(tables.behind, tables.cuts_behind)

    def _at_first(self, kind: PlanKind, limit_ns: int, deadline: Deadline) -> Behind | None:
        """What is known by the furthest prefixes, and at the speed of the fastest device."""
        prefix = self.prefix
        prefixes = FurthestPrefixes(prefix.programme, kind, limit_ns, counts_cuts=False)
        position = prefixes.find(deadline)
        if position is None:
            return None
        trip, boundaries = prefix.least.trip, np.arange(len(prefix.line.cuts))
        furthest = np.where(np.arange(prefix.num_devices + 1) < position, prefixes.furthest[0, :, 0], boundaries[-1])
        fastest = np.append(1 / np.maximum.accumulate(prefix.speeds[::-1])[::-1], 0.0)
        trips = np.outer(fastest, trip[-1] - trip)
        trips[(boundaries > furthest[:, None]) | (boundaries < prefixes.first)] = np.inf
        return Behind(np.stack([trips, trips]), np.zeros(trips.shape, dtype=np.int32))

    def _fill(self, tables: "Tables", kind: PlanKind, limit_ns: int, num_late: int, deadline: Deadline) -> bool:
        """Fills the tables before, and then those behind; returns whether any plan is left."""
        from bapipe.planner.device_line.trip_tables import MANY
        from bapipe.planner.device_line.trips_before import fill_before
        from bapipe.planner.device_line.trips_behind import fill_behind

        problem, late, limit = self.prefix.programme, self._late, limit_ns * (1 + 1e-12)
        num = self.prefix.num_devices
        tables.before[:, : 1 + num_late], tables.cuts_before[:] = np.inf, MANY
        tables.before[:, :, 0, 0], tables.cuts_before[0, 0] = 0.0, 0
        for p in range(num + 1):
            if p % POSITIONS_AT_ONCE == 0:
                deadline.check()
            self.num_tried += fill_before(problem, late, kind, limit, tables, num_late, p)
        if np.isinf(tables.before[0, 0, :, -1]).all():
            return False
        tables.behind[:], tables.cuts_behind[:] = np.inf, MANY
        tables.behind[:, 1:, -1], tables.cuts_behind[1:, -1] = 0.0, 0
        for p in range(num - 1, -1, -1):
            if p % POSITIONS_AT_ONCE == 0:
                deadline.check()
            self.num_tried += fill_behind(problem, late, kind, limit, tables, num_late, p)
        return bool(np.isfinite(tables.behind[0, 0, 0]))


def _late(prefix: PrefixBound) -> "Late":
    """What the compiled programme needs to know of micro-batches behind others, and of the layers and cuts."""
    from bapipe.planner.device_line.trip_limits import Late

    num, most = prefix.num_microbatches, prefix.groups.most
    left = num - 1 - (-(-num // most) - 1) * most
    numbers = np.unique(np.append(0, np.geomspace(1, max(1, int(left.max())), NUM_LATE).astype(np.int64)))
    more = numbers // most[:, None]
    of_forward, of_critical = np.min([sums.least_shares for sums in prefix.kinds_of_stages.sums], axis=0)
    at_host = np.zeros(prefix.num_devices + 1, dtype=np.int64)
    if not prefix.has_one_speed:  # of alike devices some may be idle, wherever
        at_host[1:-1] = np.diff(prefix.boundaries_before) > 0
    return Late(
        numbers=numbers,
        more=more,
        then=np.searchsorted(numbers, numbers - more * most[:, None], side="right") - 1,
        of_class=np.searchsorted(numbers, left, side="right") - 1,
        forward_share=float(min(of_forward, 0.5)),  # no gradient is larger than what it is of
        critical_share=float(of_critical),
        transfers=np.pad([prefix.send_ns + prefix.back_ns, prefix.between_hosts_ns], ((0, 0), (1, 1))),
        at_host=at_host,
    )
