"""Pipelines over devices that are all the same, as a `HomogeneousLoadProblem`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from bapipe.formats.cluster import Bandwidth
from bapipe.planner.compute.arrays import Bools, Indices, Ints
from bapipe.planner.throughput.loads import Boundaries, StageCostSums, load_ceiling_ns
from bapipe.simulator.interval_costs import transfer_ns

if TYPE_CHECKING:
    from bapipe.planner.throughput.loads import Counts, Positions

    DevicesAround = Callable[[float], tuple[Ints, Ints]]
    """Lower bounds on the devices before and after each boundary, for a limit on the load."""

NO_REPLICAS_NS = 1 << 45
"""What a layer that only one device may run adds to the load of several: more than any step that somebody waits for."""


class HomogeneousDevices:
    """See `HomogeneousLoadProblem`; the devices share one kind, speed and memory, and one link joins any two."""

    def __init__(
        self,
        boundaries: Boundaries,
        sums: StageCostSums,
        *,
        num_devices: int,
        num_microbatches: int,
        link: Bandwidth,
        ring: Bandwidth | None = None,
        overlaps: bool,
        memory_bytes: int,
        max_replicas: int | None = None,
        devices_around: "DevicesAround | None" = None,
    ) -> None:
        """All-reduces go over `ring`, if given; `devices_around` raises the devices needed around boundaries."""
        self._boundaries, self._sums, self._link, self._ring = boundaries, sums, link, ring or link
        self._devices_around = devices_around
        self._overlaps, self._memory_bytes = overlaps, memory_bytes
        self.num_boundaries, self.num_microbatches = boundaries.num_boundaries, num_microbatches
        # A device beyond the number of micro-batches would have nothing to do.
        self.num_devices, self.max_replicas = num_devices, min(max_replicas or num_devices, num_microbatches)
        self._last = boundaries.num_boundaries - 1
        self._send_ns = transfer_ns(sums.send_bytes, link)  # [boundaries]
        self._return_ns = transfer_ns(sums.grad_bytes, link)  # [boundaries]
        # If every device can hold everything, memory excludes nothing and later devices do not matter.
        self.depends_on_later_devices = sums.max_bytes(self.num_devices, num_microbatches) > memory_bytes
        self._rounding_ns = 2 * num_devices
        """F and B of each stage are rounded, so their sum may be this much below the whole model's time."""

    @property
    def bound_ns(self) -> float:
        """A lower bound on the load: the micro-batches' F and B shared out evenly among all devices."""
        total = int(self._sums.microbatch_ns(0, self._last)) - self._rounding_ns
        return max(0.0, self.num_microbatches * total / self.num_devices)

    @property
    def ceiling_ns(self) -> float:
        """An upper bound on the load of every plan."""
        return load_ceiling_ns(self._boundaries, [self._sums], self.num_microbatches, self.num_devices, [self._ring])

    def loads(self, devices: "Counts", begin: "Positions", end: "Positions") -> Ints:
        """Returns the loads of stages; the arguments broadcast."""
        times = -(-self.num_microbatches // devices)
        compute = self._compute_ns(devices, begin, end)
        transfers = [times * cut for cut in self._transfers_ns(begin, end)]
        if self._overlaps:
            largest: Ints = np.maximum.reduce([compute, *np.broadcast_arrays(compute, *transfers)[1:]])
            return self._sums.with_feasible_replicas(largest, begin, end, devices)
        return self._sums.with_feasible_replicas(compute + sum(transfers), begin, end, devices)

    def _compute_ns(self, devices: "Counts", begin: "Positions", end: "Positions") -> Ints:
        """Returns F and B of all micro-batches that a device runs, update and all-reduce."""
        times = -(-self.num_microbatches // devices)
        once = self._sums.per_step_ns(begin, end, devices, self._ring)
        compute: Ints = times * self._sums.microbatch_ns(begin, end) + once
        return compute

    def costs_before(self) -> tuple[Ints, Ints, Ints]:
        """Returns what a `DownsetBound` needs of each boundary but the first, which is empty.

        The compute of all layers before it as one stage of r devices, [boundaries, counts]; its longest transfer, and
        what both add to a load, [boundaries].
        """
        ends, counts = np.arange(1, self.num_boundaries), np.arange(1, self.max_replicas + 1)
        single = self._sums.num_without_replicas(0, ends)[:, None] * NO_REPLICAS_NS
        compute = self._compute_ns(counts, 0, ends[:, None]) + np.where(counts > 1, single, 0)
        send, back = self._send_ns[1:], self._return_ns[1:]
        return compute, np.maximum(send, back), np.zeros_like(send) if self._overlaps else send + back

    def rounding_of_stages_ns(self) -> Ints:
        """Returns how much less a stage of r devices may compute than the difference of two costs before. [counts]

        F is rounded once, B once or as I and W; so is what is subtracted. That is 4.5 ns at most, and 1.5 of an update.
        The rest never takes less: all-reduces and the longer of two times are subadditive.
        """
        times = -(-self.num_microbatches // np.arange(1, self.max_replicas + 1))
        return 5 * times + 2 if self._sums.is_rounded else np.zeros_like(times)

    def _transfers_ns(self, begin: "Positions", end: "Positions") -> tuple[Ints, ...]:
        """Per micro-batch: activations in, gradients back, activations out, gradients in."""
        return self._send_ns[begin], self._return_ns[begin], self._send_ns[end], self._return_ns[end]

    def load(self, devices: int, begin: int, end: int) -> float:
        return int(self.loads(devices, begin, end))

    def fits(self, devices: "Counts", begin: "Positions", end: "Positions", after: "Counts") -> Bools:
        """Returns whether a stage fits in memory if `after` more devices run the stages after it."""
        times = -(-self.num_microbatches // devices)
        in_flight = np.minimum(-(-(after + devices) // devices), times)
        return self._sums.fits(begin, end, in_flight, times, self._memory_bytes)

    def min_devices(self, begin: Indices, end: Indices, after: Ints, available: Ints, limit: float) -> Ints:
        """Starts from a lower bound on the devices of each stage, and adds one until its load is below the limit."""
        result: Ints = np.full((begin.size, end.size), self.num_devices + 1, dtype=np.int64)
        rows, columns = np.nonzero(self._boundaries.nested[np.ix_(begin, end)] & (available > 0))
        # From here on everything has shape [stages still undecided].
        first, last, later = begin[rows], end[columns], np.broadcast_to(after, result.shape)[rows, columns]
        most = np.minimum(self.max_replicas, available[rows, columns])
        # F + B, and each transfer, takes M / r times per device: r must be at least M times each over the limit.
        each = self._sums.microbatch_ns(first, last)
        # Starting below the true minimum costs a few rounds; starting above it would lose plans.
        for cut in self._transfers_ns(first, last):
            each = np.maximum(each, cut)
        devices = np.maximum((each * (self.num_microbatches / limit) * (1 - 1e-9)).astype(np.int64), 1)
        while True:
            possible = devices <= most
            rows, columns, first, last, later, most, devices = (
                values[possible] for values in (rows, columns, first, last, later, most, devices)
            )
            if not devices.size:
                return result
            good = self.loads(devices, first, last) < limit
            if self.depends_on_later_devices:
                # Memory is checked only for the stages whose load is below the limit.
                good[good] = self.fits(devices[good], first[good], last[good], later[good])
            result[rows[good], columns[good]] = devices[good]
            # A finished stage leaves the loop: more devices than there are.
            devices = np.where(good, self.num_devices + 1, devices + 1)

    def min_devices_around(self, limit: float) -> tuple[Ints, Ints]:
        """The devices that the compute on each side needs, and the transfers at the boundary."""
        everywhere = np.arange(self.num_boundaries)
        # Slightly rounded down, so that floating point cannot make a bound too large.
        needs = self.num_microbatches / limit * (1 - 1e-9)
        across = np.maximum(self._send_ns, self._return_ns)
        before = np.maximum(self._sums.microbatch_ns(0, everywhere) - self._rounding_ns, across)
        after = np.maximum(self._sums.microbatch_ns(everywhere, self._last) - self._rounding_ns, across)
        counts = np.ceil(np.stack([before, after]) * needs).clip(0).astype(np.int64)
        if self._devices_around is not None:
            counts = np.maximum(counts, np.stack(self._devices_around(limit)))
        return counts[0], counts[1]
