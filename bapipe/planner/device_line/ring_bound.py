"""Decides whether any plan can be within a step time, with the rings of early stages behind backwards of later ones.

The bounds of a stage in `prefix_bound.py` end with its own rings, or with the way back of its last micro-batch. But
every earlier stage has the last micro-batches of a later one on their way back before it, several of them on one
replica, and only then the rings of its own gradients: its *delay*, beyond the way back of one micro-batch. So the
dynamic programme over prefixes has levels: of what the longest delay so far is. A level is a range, of which the limits
of later stages use the lower end (docs/algorithm.md, Many devices).

Many kinds of plans are decided at once, as numpy takes hardly longer for many prefixes than for a few.
"""

import numpy as np

from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.furthest_prefixes import FurthestPrefixes
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.prefix_bound import ROUNDING_NS, PrefixBound
from bapipe.planner.device_line.replica_weights import FloatArray

DENSITY = 0.8
"""Delays count each micro-batch left behind as this part of all B of one, divided by the devices."""

NUM_LEVELS, STEPS_OF_LEVEL = 48, 8
"""Levels of delays, and the steps of each that tables of delays tell apart."""

NUM_STEPS = 2 * NUM_LEVELS * STEPS_OF_LEVEL

MAX_CELLS = 201
"""Boundaries in the tables of delays; in longer chains several count as one."""


class RingBound:
    """The problem of a prefix bound on alike devices, with 1F1B or GPipe.

    Attributes:
        num_tried: the work so far, see `FurthestPrefixes`.
    """

    def __init__(self, prefix: PrefixBound, longest_ns: float) -> None:
        """Delays above `longest_ns` are not told apart."""
        self.prefix, self.num_tried = prefix, 0
        self._delays = _Delays(prefix, longest_ns).tables

    def is_feasible(self, kind: PlanKind, limit_ns: int, deadline: Deadline, *, has_delays: bool) -> bool:
        """Returns whether the relaxation has a plan of a kind within a step time; `has_delays`: whether they count."""
        prefixes = FurthestPrefixes(self.prefix.programme, kind, limit_ns, self._delays if has_delays else None)
        try:
            return prefixes.find(deadline) is not None
        finally:
            self.num_tried += prefixes.num_tried


class _Delays:
    """Tables of how much longer than the way back a stage takes behind the last backward of any later one.

    Let y + 1 micro-batches leave the later stage at the end, and R be the devices of the earlier one, with backward b.
    The delay is at least e + floor(y / R) b, and that at least e + h + y density, with the smallest h over all y. Here
    e is B of the first bucket and the rings, less B of all layers before the stage's end and the transfers back over
    the cuts before it, but 0 at least. Levels are ranges of e + h.
    """

    def __init__(self, prefix: PrefixBound, longest_ns: float) -> None:
        from bapipe.planner.device_line.prefix_programme import Delays

        self._prefix = prefix
        self._density = DENSITY * float(prefix.least.backward[-1]) / prefix.max_speed / prefix.num_devices
        # As many micro-batches but one are each the last one of a replica that has the most.
        most, num = prefix.groups.most, prefix.num_microbatches
        left = np.minimum(num - 1 - (-(-num // most) - 1) * most, (num - 1) // 2)  # [groups]
        self._most_left = int(left.max())
        self._least = -self._most_left * self._density
        self._step = (longest_ns - self._least) / (NUM_LEVELS * STEPS_OF_LEVEL)
        self._num = len(prefix.line.cuts)
        self._cells = np.unique(np.linspace(0, self._num - 1, MAX_CELLS).astype(np.int64))
        # A stage counts as if it began at the last boundary of a cell, and ended at the first one of another.
        self._cell_of = np.searchsorted(self._cells, np.arange(self._num))
        self._firsts = np.concatenate([[0], self._cells[:-1] + 1])
        by_group = [self._last_ends(g) for g in range(prefix.groups.fewest.size)]
        back = np.cumsum(np.append(0.0, np.sort(prefix.back_ns)[::-1]))
        from_ns = np.array([self._least + level * STEPS_OF_LEVEL * self._step for level in range(NUM_LEVELS)])
        from_ns[0] = -np.inf
        self.tables = Delays(
            from_ns=from_ns,
            left_ns=left * self._density,
            cell_of=self._cell_of,
            by_filler=np.stack([table for table, _ in by_group]),
            by_rings=np.stack([table for _, table in by_group]),
            steps_back=np.ceil(back / self._step).astype(np.int64),
            steps_of_level=STEPS_OF_LEVEL,
        )

    def _between(self, sums: FloatArray) -> FloatArray:
        """Differences of prefix sums from the last boundary of a cell to the first one of another. [cells, cells]"""
        between: FloatArray = np.maximum(sums[self._firsts][None, :] - sums[self._cells][:, None], 0.0)
        return between

    def _last_ends(self, g: int) -> tuple[IntArray, IntArray]:
        """The last ends of stages of a class with h, and e + h, below so many steps from the least. [cells, steps]"""
        prefix, most, y = self._prefix, int(self._prefix.groups.most[g]), self._most_left
        speed = prefix.max_speed
        backward = self._between(prefix.least.backward) / speed
        whole = y // most
        filler = np.full_like(backward, -min(most - 1, y) * self._density)
        if whole >= 1:
            filler = np.minimum(filler, (whole - 1) * backward - (whole * most - 1) * self._density)
            filler = np.minimum(filler, whole * backward - y * self._density)
        filler -= ROUNDING_NS * (y // int(prefix.groups.fewest[g]) + 3)
        # Until the first bucket is full, without the way back from the stage's end.
        first = np.minimum.reduceat(prefix.least.first_bucket - prefix.least.backward, self._firsts)[None, :]
        first = np.minimum(first, -prefix.least.before_gradients[self._cells][:, None])
        rings = prefix.rings.least_ns(g, self._between(prefix.gradients)) + first / speed
        return self._last_cells(filler), self._last_cells(rings + filler)

    def _last_cells(self, values: FloatArray) -> IntArray:
        """The last boundary whose value, from each cell on, is below so many steps. [cells, steps]"""
        num_cells, num_steps = values.shape[0], NUM_STEPS
        least = np.minimum.accumulate(values[:, ::-1], axis=1)[:, ::-1]  # of longer stages
        step = np.clip(np.floor((least - self._least) / self._step), 0, num_steps).astype(np.int64)
        flat = step + np.arange(num_cells)[:, None] * (num_steps + 1)
        of_step = np.bincount(flat.ravel(), minlength=num_cells * (num_steps + 1)).reshape(num_cells, -1)
        count = np.cumsum(of_step, axis=1) - of_step  # with fewer steps
        last: IntArray = self._cells[np.maximum(count - 1, 0)]
        return last
