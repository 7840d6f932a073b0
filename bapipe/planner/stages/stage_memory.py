"""Which layer intervals fit into the memory of a placement's devices, and which layers they recompute to fit.

Shapes: `[rows]`, one entry per interval asked for.
"""

from collections.abc import Callable, Sequence

import numpy as np

from bapipe.planner.stages.devices import DeviceClass
from bapipe.planner.stages.interval_memory import IntervalMemory
from bapipe.planner.stages.intervals import INF, MAX_TIME, BoolArray, IntArray, IntervalIndex, Rows
from bapipe.planner.stages.layer_knapsack import RecomputedLayers
from bapipe.planner.stages.placements import StagePlacement
from bapipe.planner.stages.recomputation import Recomputation, StashLimit
from bapipe.simulator.interval_costs import at_speed

ForbiddenIntervals = Callable[[StagePlacement, Rows], BoolArray | None]
"""Returns which of some intervals constraints forbid on a placement; None if they forbid none. [rows]"""


class StageMemory:
    """The memory of stages on any placement, at one micro-batch size.

    Attributes:
        of_class: the bytes of each interval. [device classes]
        recomputation: how layers are recomputed; None if they must not be.
    """

    def __init__(
        self,
        intervals: IntervalIndex,
        classes: Sequence[DeviceClass],
        of_class: Sequence[IntervalMemory],
        recomputation: Recomputation | None,
        forbidden: ForbiddenIntervals,
    ) -> None:
        """`forbidden` are the intervals that the constraints forbid on a placement."""
        self.intervals, self.classes, self.of_class = intervals, classes, of_class
        self.recomputation, self._forbidden = recomputation, forbidden

    @property
    def may_recompute(self) -> bool:
        """Whether layers of stages may be recomputed."""
        return self.recomputation is not None

    def fitting(self, placement: StagePlacement, rows: Rows) -> tuple[BoolArray, BoolArray, dict[int, IntArray]]:
        """Returns which intervals fit, which of these only with recomputation, and the F that recomputation adds.

        The F is a lower bound in ns, by device class, for the intervals that need recomputation; {} if none do. For
        these, to fit is only a necessary condition: `recomputed_layers` decides. All arrays are [rows].
        """
        fits_plain = self._shortfall_bytes(placement, rows, recompute=False) <= 0
        fits, recompute = fits_plain, np.zeros(fits_plain.shape, dtype=bool)
        again_ns: dict[int, IntArray] = {}
        if self.may_recompute and not fits_plain.all():
            # Recomputation only costs time, so a stage recomputes only if it does not fit without.
            again_ns = self.recomputed_ns(placement, rows)
            fits = np.logical_and.reduce([ns < INF for ns in again_ns.values()])
            recompute = fits & ~fits_plain
        forbidden = self._forbidden(placement, rows)
        if forbidden is not None:
            fits = fits & ~forbidden
        return fits, recompute, again_ns if recompute.any() else {}

    def recomputed_ns(self, placement: StagePlacement, rows: Rows) -> dict[int, IntArray]:
        """Returns for each device class of the placement a lower bound on the F that recomputation adds, in ns. [rows]

        `INF` where no recomputation suffices. If the tensors between recomputed layers and others are ignored, a state
        fits if kept * (stash - saved) + in_backward * saved <= room. Replicas of one kind recompute the same layers.
        """
        assert self.recomputation is not None
        least_saved: dict[str, IntArray] = {}
        for k in placement.distinct_replicas():
            c, load = placement.device_classes[k], placement.schedule.replicas[k]
            kind, stash = self.classes[c].device.kind, self.of_class[c].stash_bytes[rows]
            for peak in load.memory_peaks:
                lacking = peak.kept * stash - self._room_bytes(placement, k, rows, peak.before_weight_grad)
                per_byte = peak.kept - peak.in_backward
                saved = -(-lacking // per_byte) if per_byte > 0 else np.where(lacking > 0, INF, 0)
                saved = np.where(saved > stash, INF, np.maximum(saved, 0))
                least_saved[kind] = np.maximum(least_saved.get(kind, 0), saved)
        again_ns = {}
        for c in set(placement.device_classes):
            device = self.classes[c].device
            saved = least_saved[device.kind]
            least_ns = at_speed(self.recomputation.bounds[device.kind].least_ns(saved, rows), device.speed, MAX_TIME)
            again_ns[c] = np.where(saved >= INF, INF, least_ns)
        return again_ns

    def recomputed_layers(self, placement: StagePlacement, begin: int, end: int) -> RecomputedLayers:
        """Returns the layers that a stage between two boundaries recomputes so that it fits."""
        number = self.intervals.row(begin).start + end - begin - 1
        row = slice(number, number + 1)
        if self._shortfall_bytes(placement, row, recompute=False)[0] <= 0:
            return RecomputedLayers(layers=frozenset(), total_ns=0, is_best=True)
        if not self.may_recompute:
            return RecomputedLayers(layers=frozenset(), total_ns=INF, is_best=True)
        assert self.recomputation is not None
        limits = [
            StashLimit(
                kind=self.classes[placement.device_classes[k]].device.kind,
                kept=peak.kept,
                in_backward=peak.in_backward,
                room_bytes=int(self._room_bytes(placement, k, row, peak.before_weight_grad)[0]),
            )
            for k in placement.distinct_replicas()
            for peak in placement.schedule.replicas[k].memory_peaks
        ]
        return self.recomputation.choice.best(
            self.intervals.cuts[begin],
            self.intervals.cuts[end],
            limits,
            self.classes[placement.device_classes[0]].device.kind,
            whole_fits=bool(self._shortfall_bytes(placement, row, recompute=True)[0] <= 0),
        )

    def _room_bytes(self, placement: StagePlacement, k: int, rows: Rows, num_before_weight_grad: int) -> IntArray:
        """Returns the bytes left for stashes on replica k in a state with some micro-batches before their W. [rows]"""
        c, load = placement.device_classes[k], placement.schedule.replicas[k]
        memory = self.of_class[c]
        room = self.classes[c].limit_bytes - memory.static_bytes[rows]
        if num_before_weight_grad:
            room = room - num_before_weight_grad * memory.gradient_stash_bytes[rows]
        if placement.receives_activations:
            room = room - load.num_microbatches * memory.input_bytes[rows]
        if placement.receives_gradients:
            room = room - load.num_microbatches * memory.output_grad_bytes[rows]
        return room

    def shortfall_bytes(self, placement: StagePlacement) -> IntArray:
        """Returns the bytes that the worst replica lacks, with all or nothing recomputed, as is better. [intervals]

        `INF` if the interval is forbidden; negative or 0 if it fits.
        """
        shortfall = self._shortfall_bytes(placement, slice(None), recompute=False)
        if self.may_recompute:
            shortfall = np.minimum(shortfall, self._shortfall_bytes(placement, slice(None), recompute=True))
        forbidden = self._forbidden(placement, slice(None))
        return shortfall if forbidden is None else np.where(forbidden, INF, shortfall)

    def _shortfall_bytes(self, placement: StagePlacement, rows: Rows, *, recompute: bool) -> IntArray:
        """Returns the bytes by which the worst replica exceeds its device's limit; negative if all have room. [rows]

        As in the simulator, a device holds the static bytes, receive buffers for all of its micro-batches of the step,
        and what is in flight: the maximum over the memory peaks of the schedule.
        """
        shortfalls = []
        for k in placement.distinct_replicas():
            c, load = placement.device_classes[k], placement.schedule.replicas[k]
            memory = self.of_class[c]
            needed = memory.static_bytes[rows] + memory.in_flight_bytes(load.memory_peaks, rows, recompute=recompute)
            if placement.receives_activations:
                needed = needed + load.num_microbatches * memory.input_bytes[rows]
            if placement.receives_gradients:
                needed = needed + load.num_microbatches * memory.output_grad_bytes[rows]
            shortfalls.append(needed - self.classes[c].limit_bytes)
        worst: IntArray = np.maximum.reduce(shortfalls)
        return worst
