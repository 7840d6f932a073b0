"""Runs the compiled dynamic programme of `prefix_programme.py` for one kind of plan and one step time."""

from typing import TYPE_CHECKING

import numpy as np

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.plan_kind import PlanKind

if TYPE_CHECKING:
    from bapipe.planner.device_line.stage_arrays import BoundInputs
    from bapipe.planner.device_line.stage_delays import Delays

POSITIONS_AT_ONCE = 64
"""How many devices are handled between two checks of the deadline."""


class FurthestPrefixes:
    """The furthest boundaries that prefixes of plans reach within a step time.

    Attributes:
        furthest: by level of delays, devices and cuts; -1 where nothing is known. [levels, devices + 1, cuts + 2]
        first: the first boundary after which the remaining devices can do all work. [devices + 1, cuts + 2]
        origin: the devices before the last stage, where there is one level. [devices + 1, cuts + 2]
    """

    def __init__(
        self,
        problem: "BoundInputs",
        kind: PlanKind,
        limit_ns: int,
        delays: "Delays | None" = None,
        *,
        counts_cuts: bool = True,
    ) -> None:
        """Without `delays`, work after the gradients have returned to the first stage is ignored.

        Args:
            counts_cuts: whether prefixes with different numbers of cuts are distinguished.
        """
        from bapipe.planner.device_line.stage_delays import without_delays

        self._problem, self._kind = problem, kind
        self._limit = limit_ns * (1 + 1e-12)
        self._delays = without_delays() if delays is None else delays
        num_columns = kind.most_cuts + 2 if counts_cuts else 1
        shape = self._delays.from_ns.size, problem.stages.shape[0] + 1, num_columns
        self.furthest = np.full(shape, -1, dtype=np.int32)
        self.furthest[0, 0, 0] = 0
        self.origin = np.full(shape[1:], -1, dtype=np.int32)
        self.first = np.full(shape[1:], problem.layers.shape[1] - 1, dtype=np.int32)
        self._num_tried = np.zeros(1, dtype=np.int64)

    @property
    def num_tried(self) -> int:
        """How many (prefix, class of stages) pairs have been tried: the work so far."""
        return int(self._num_tried[0])

    def find(self, deadline: Deadline) -> int | None:
        """Returns the number of devices of a prefix that holds all layers, None if there is none."""
        from bapipe.planner.device_line.early_waits import early_waits
        from bapipe.planner.device_line.prefix_programme import extend
        from bapipe.planner.device_line.suffix_programme import extend_backwards

        num_devices = self._problem.stages.shape[0]
        waits = early_waits(self._problem, self._kind)
        for end in range(num_devices, 0, -POSITIONS_AT_ONCE):
            deadline.check()
            begin = max(0, end - POSITIONS_AT_ONCE)
            extend_backwards(self._problem, self._kind, waits, self._limit, self.first, begin, end, self._num_tried)
        if self.first[0, 0] > 0:
            return None
        waits = early_waits(self._problem, self._kind, self.first[:, min(1, self.first.shape[1] - 1)])
        for begin in range(0, num_devices + 1, POSITIONS_AT_ONCE):
            deadline.check()
            position = extend(
                self._problem,
                self._kind,
                waits,
                self._delays,
                self._limit,
                self.first,
                self.furthest,
                self.origin,
                begin,
                min(begin + POSITIONS_AT_ONCE, num_devices + 1),
                self._num_tried,
            )
            if position >= 0:
                return position
        return None
