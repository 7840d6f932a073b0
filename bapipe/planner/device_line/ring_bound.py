"""Decides whether any plan can be within a step time, counting rings of early stages after backwards of later ones.

The bounds of a stage in `prefix_bound.py` end with its own rings, or with the way back of its last micro-batch. But
every earlier stage must still run the backwards of the later stage's last micro-batches, several of them on one
replica, and only then the rings of its own gradients: its *delay* is what this takes beyond the way back of one
micro-batch. So the states of the dynamic programme over prefixes include the level of the longest delay so far. A level
is a range of delays; the limits of later stages use its lower end (docs/many_devices.md).

Let the later stage's last y + 1 micro-batches end together, and let R be the devices of the earlier one, with backward
b. The delay is at least e + floor(y / R) b, and that is at least e + h + y density, with the smallest h over all y.
Here e is B of the first bucket plus the rings, less B of all layers before the stage's end and the transfers back over
the cuts before it, and at least 0. Levels are ranges of e + h. On different devices y counts as 0: the last
micro-batches of replicas that are not equally fast do not end together.
"""

import threading
from typing import TYPE_CHECKING

import numpy as np

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.furthest_prefixes import FurthestPrefixes
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.prefix_bound import ROUNDING_NS, PrefixBound

if TYPE_CHECKING:
    from bapipe.planner.device_line.stage_delays import Delays

DENSITY = 0.7
"""Delays count each of the y micro-batches as this part of all layers' B, divided by the number of devices."""

FEW_LEVELS, MANY_LEVELS = 32, 64
"""Numbers of levels of delays."""


class RingBound:
    """The problem of a prefix bound with replicas, and 1F1B or GPipe.

    Attributes:
        num_tried: the work so far, see `FurthestPrefixes`.
    """

    def __init__(self, prefix: PrefixBound, longest_ns: float) -> None:
        """Delays above `longest_ns` are not distinguished."""
        self.prefix, self.num_tried = prefix, 0
        self._counts = threading.Lock()
        self._few, self._many = (_delays(prefix, longest_ns, num) for num in (FEW_LEVELS, MANY_LEVELS))

    def is_feasible(
        self, kind: PlanKind, limit_ns: int, deadline: Deadline, *, counts_cuts: bool = True, is_fine: bool = True
    ) -> bool:
        """Returns whether the relaxation has a plan of a kind within a step time.

        Args:
            counts_cuts: whether prefixes with different numbers of cuts are distinguished, which takes longer.
            is_fine: whether to use many levels of delays, which takes longer.
        """
        delays = self._many if is_fine else self._few
        prefixes = FurthestPrefixes(self.prefix.programme, kind, limit_ns, delays, counts_cuts=counts_cuts)
        try:
            return prefixes.find(deadline) is not None
        finally:
            with self._counts:  # ranges are asked in several threads
                self.num_tried += prefixes.num_tried


def _delays(prefix: PrefixBound, longest_ns: float, num_levels: int) -> "Delays":
    """Returns the delays for the compiled programme."""
    from bapipe.planner.device_line.stage_delays import Delays

    few, most, num = prefix.classes.fewest, prefix.classes.most, prefix.num_microbatches
    left = np.zeros_like(most)
    if prefix.has_one_speed:
        # All but one of these micro-batches are the last of some replica with the maximum number of micro-batches.
        left = np.minimum(num - 1 - (-(-num // most) - 1) * most, (num - 1) // 2)
    density_ns = DENSITY * float(prefix.least.backward[-1]) / prefix.max_speed / prefix.num_devices
    most_left = int(left.max())
    rounds = most_left // most
    counted = [-np.minimum(most - 1, most_left), 1 - rounds * most, np.full_like(most, -most_left)]
    rounding_ns = ROUNDING_NS * (most_left // few + 3) + prefix.rounded_ns
    least_ns = -most_left * density_ns
    level_ns = (longest_ns - least_ns) / num_levels
    from_ns = least_ns + level_ns * np.arange(num_levels, dtype=float)
    from_ns[0] = -np.inf
    return Delays(
        from_ns=from_ns,
        least_ns=least_ns,
        level_ns=level_ns,
        left=left * density_ns,
        rounds=rounds.astype(float),
        filler=np.stack(counted, axis=1) * density_ns - rounding_ns[:, None],
        back=np.cumsum(np.append(0.0, np.sort(prefix.back_ns)[::-1])),
    )
