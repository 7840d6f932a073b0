"""A lower bound on the load of every plan of a graph on equal devices, from what its cuts must at least transfer.

For a limit on the load, the first n devices get as far as some work, F + B of a micro-batch: beyond what the devices
before reached by what a stage can do within the limit, as far as there is a window whose cuts can be transferred.
Nothing says that the cuts of two stages are nested, so this is a relaxation; if the devices do not reach the end, no
plan is below the limit. The same from the end backwards says which work a cut after n devices can have.
"""

from dataclasses import dataclass

import numpy as np

from bapipe.formats.cluster import Bandwidth
from bapipe.planner.compute.arrays import Ints
from bapipe.planner.throughput.cut_windows import CutWindows
from bapipe.simulator.interval_costs import ring_ns, transfer_ns

PRECISION = 1.0005
"""Bisection ends when the limits without and with a relaxed plan are within this factor."""

ROUNDED = 1e-9
"""Relative margin for floating point, so that no bound is too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBound:
    """Equal devices with one link between any two. `speed` divides the windows' work."""

    windows: CutWindows
    microbatch_size: int
    num_devices: int
    num_microbatches: int
    speed: float
    link: Bandwidth
    overlaps: bool

    def raised(self, bound_ns: float, load_ns: float) -> float:
        """Returns the largest bound found between a bound and the load of a plan."""
        low, high = bound_ns, load_ns
        while high > low * PRECISION:
            middle = (low + high) / 2
            low, high = (low, middle) if self.may_reach(middle) else (middle, high)
        return low

    def may_reach(self, limit_ns: float) -> bool:
        """Returns whether the relaxation has a plan of which no load exceeds the limit; if not, there is none."""
        return bool(self._reached(self.windows, limit_ns)[-1] >= self.windows.most_ns[-1])

    def devices_around(self, work_ns: Ints, limit_ns: float) -> tuple[Ints, Ints]:
        """Returns how many devices at least run what is before, and after, cuts; from the work before them. [cuts]"""
        total_ns = int(self.windows.most_ns[-1])
        before = np.searchsorted(self._reached(self.windows, limit_ns), work_ns, side="left")
        after = np.searchsorted(self._reached(self.windows.backwards(), limit_ns), total_ns - work_ns, side="left")
        return before.astype(np.int64), after.astype(np.int64)

    def between(self, limit_ns: float) -> list[tuple[float, float]]:
        """Returns the least and the most work before a cut of a plan within a limit, for n = 1, ... devices there."""
        total_ns = float(self.windows.most_ns[-1])
        forward = self._reached(self.windows, limit_ns)
        backward = self._reached(self.windows.backwards(), limit_ns)
        ranges = [(total_ns - backward[-1 - n], forward[n]) for n in range(1, self.num_devices)]
        return [(least, most) for least, most in ranges if least <= most]

    def _reached(self, windows: CutWindows, limit_ns: float) -> list[float]:
        """Returns for each number of devices the most work that they can have, as at speed 1."""
        limit_ns = limit_ns * (1 + ROUNDED)
        # A device beyond the number of micro-batches would have nothing to do.
        counts = range(1, min(self.num_devices, self.num_microbatches) + 1)
        times = [-(-self.num_microbatches // count) for count in counts]
        send_ns, return_ns = transfer_ns(windows.send_bytes, self.link), transfer_ns(windows.grad_bytes, self.link)
        longest_ns = np.maximum(send_ns, return_ns)  # [windows]
        crossing_ns = np.zeros_like(send_ns) if self.overlaps else send_ns + return_ns
        least_ns = windows.least_ns / self.speed * (1 - ROUNDED)
        most_ns = windows.most_ns / self.speed * (1 + ROUNDED)
        most_gradients = np.maximum.accumulate(windows.most_gradient_bytes)
        # Of n devices: the most work before their last stage's end; and the most that it is above what crosses there.
        reached, credit = [0.0], [0.0]
        for n in range(1, self.num_devices + 1):
            reached.append(reached[-1])
            credit.append(credit[-1])
            for count, each in zip(counts[:n], times, strict=False):
                # A stage that begins at most at `reached` has at least these gradients to sum.
                last = int(np.searchsorted(least_ns, reached[n - count], side="right")) - 1
                before = most_gradients[last] if n > count else 0
                gradients = np.maximum(windows.least_gradient_bytes - before, 0)
                share_ns = (limit_ns - ring_ns(gradients, count, [self.link])) / each + 2  # F and B are rounded
                # A stage pays the transfers of both its cuts; those of the first are in the credit.
                ends = np.minimum(reached[n - count] + share_ns, credit[n - count] + share_ns - crossing_ns)
                ends = np.minimum(ends, most_ns)
                possible = (ends >= least_ns) & (each * longest_ns <= limit_ns)
                if possible.any():
                    reached[n] = max(reached[n], float(ends[possible].max()))
                    credit[n] = max(credit[n], float((ends - crossing_ns)[possible].max()))
        return [ns * self.speed * (1 + ROUNDED) for ns in reached]
