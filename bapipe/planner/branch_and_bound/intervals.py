"""All runs of layers between two places where the chain may be cut, as flat arrays: times and bytes of each.

Places 0 to K are the start of the chain, the legal cuts, and its end. Runs are sorted by the place where they start,
then by the one where they end: a place's runs are a slice, and a minimum over ends is one `reduceat`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from bapipe.formats.cluster import Bandwidth
from bapipe.formats.profile import LayerProfile, ModelProfile
from bapipe.simulator.stage_cost import BUCKET_BYTES
from bapipe.simulator.tied_weights import TiedWeights

IntArray = NDArray[Any]

INF = 1 << 60
"""Stands for infinity in arrays of nanoseconds; two of them still add up."""


class IntervalIndex:
    """Which runs there are. `starts` and `ends` are places, `cuts` the layers before which the places are."""

    def __init__(self, cuts: Sequence[int]) -> None:
        self.cuts = tuple(cuts)
        self.num_places = len(cuts)
        last = len(cuts) - 1
        self.starts = np.repeat(np.arange(last), np.arange(last, 0, -1))
        self.ends = np.concatenate([np.arange(i + 1, last + 1) for i in range(last)])
        self.first = np.concatenate([[0], np.cumsum(np.arange(last, 0, -1))])

    def row(self, place: int) -> slice:
        """Returns where the runs that start at a place are."""
        return slice(int(self.first[place]), int(self.first[place + 1]))

    def differences(self, values: Sequence[int]) -> IntArray:
        """Returns the sum of a figure of the layers over each run."""
        sums = np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])[list(self.cuts)]
        found: IntArray = sums[self.ends] - sums[self.starts]
        return found

    def largest(self, values: Sequence[int]) -> IntArray:
        """Returns the largest figure of the layers in each run."""
        pieces = np.maximum.reduceat(np.array(values, dtype=np.int64), self.cuts[:-1])
        rows = [np.maximum.accumulate(pieces[i:]) for i in range(len(pieces))]
        return np.concatenate(rows)

    def least(self, values: IntArray) -> IntArray:
        """Returns for each place the least over the runs that start there; `INF` for the last place."""
        return np.append(np.minimum.reduceat(values, self.first[:-1]), INF)


class IntervalMemory:
    """Bytes of every run at one micro-batch size, on one kind of device."""

    def __init__(
        self, grid: IntervalIndex, profile: ModelProfile, microbatch_size: int, alive: Sequence[Sequence[int]]
    ) -> None:
        measured = profile.at(microbatch_size)
        held = [2 * layer.param_bytes + layer.optimizer_state_bytes for layer in profile.layers]
        self.held = grid.differences(held) + grid.largest([m.workspace_bytes for m in measured])
        self.held += _copies(grid, profile)
        self.stash = grid.differences([m.stash_bytes for m in measured])
        self.left = grid.differences([m.left_by_input_grad_bytes for m in measured])
        send, grad = (np.array([side[cut] for cut in grid.cuts], dtype=np.int64) for side in alive)
        self.incoming, self.returning = send[grid.starts], grad[grid.ends]


def _copies(grid: IntervalIndex, profile: ModelProfile) -> IntArray:
    """Bytes of the parameters, gradients and optimizer state that each run uses and a layer outside it counts."""
    found = np.zeros(len(grid.starts), dtype=np.int64)
    place = {layer.name: i for i, layer in enumerate(profile.layers)}

    def holds(layer: LayerProfile) -> IntArray:
        cuts, at = np.array(grid.cuts), place[layer.name]
        inside: IntArray = (cuts[grid.starts] <= at) & (at < cuts[grid.ends])
        return inside

    for owner, users, copy in TiedWeights(profile.layers).copies():
        outside = np.logical_or.reduce([holds(user) for user in users]) & ~holds(owner)
        found += np.where(outside, 2 * copy.param_bytes + copy.optimizer_bytes, 0)
    return found


class IntervalTimes:
    """Times of every run at one micro-batch size, on one kind of device of one speed: F, I, W, B and the update."""

    def __init__(self, grid: IntervalIndex, profile: ModelProfile, microbatch_size: int, speed: float) -> None:
        self.grid, self.profile, self._speed = grid, profile, speed
        self._filling: dict[tuple[bool, bool], _BucketFill] = {}
        measured = profile.at(microbatch_size)
        self._input_grad = _sums([m.input_grad_ns for m in measured])
        self._weight_grad = _sums([m.weight_grad_ns for m in measured])
        self._backward = _sums([m.whole_backward_ns for m in measured])
        self._wholes = _sums([m.backward_ns is not UNSET for m in measured])
        self.forward = at_speed(grid.differences([m.forward_ns for m in measured]), speed)
        self.input_grad = at_speed(grid.differences([m.input_grad_ns for m in measured]), speed)
        self.weight_grad = at_speed(grid.differences([m.weight_grad_ns for m in measured]), speed)
        cuts = np.array(grid.cuts)
        self.backward = self._whole_ns(cuts[grid.starts], cuts[grid.ends])
        self.update = at_speed(grid.differences([layer.update_ns for layer in profile.layers]), speed)

    def _whole_ns(self, start: IntArray, stop: IntArray) -> IntArray:
        """B of layers `start` to `stop`: I + W, each rounded, where no layer says otherwise."""
        split = self._part_ns(self._input_grad, start, stop) + self._part_ns(self._weight_grad, start, stop)
        whole = self._part_ns(self._backward, start, stop)
        found: IntArray = np.where(self._wholes[stop] > self._wholes[start], whole, split)
        return found

    def _part_ns(self, sums: IntArray, start: IntArray, stop: IntArray) -> IntArray:
        return at_speed(sums[stop] - sums[start], self._speed)

    def reduced_ns(self, num_devices: int, links: Sequence[Bandwidth], whole: bool, beside: bool) -> IntArray:
        """Returns when the all-reduces of every run are done, counted from the start of its last B, or W.

        Buckets fill from the last layer, so one pass down the layers serves all runs that end at the same place.
        `links` are those among the devices; `beside` says that they carry a bucket while B or W goes on.
        """
        grid = self.grid
        if (whole, beside) not in self._filling:
            self._filling[whole, beside] = self._fill(whole, beside)
        filling = self._filling[whole, beside]

        def ring(held: IntArray) -> IntArray:
            share = -(-held // num_devices)
            longest = np.maximum.reduce([transfer_ns(link, share) for link in links])
            rounds: IntArray = np.minimum(2 * (num_devices - 1) * longest, INF >> 2)
            return rounds

        end = np.zeros(grid.num_places, dtype=np.int64)
        ends = np.zeros((grid.num_places, grid.num_places), dtype=np.int64)
        full = iter(filling.full)
        for place in reversed(range(grid.num_places - 1)):
            for _ in range(filling.num_full[place]):
                at, held, ready = next(full)
                end[at] = np.maximum(end[at], ready) + ring(held)
            ends[place] = end
        before = ends[grid.starts, grid.ends]
        flat: IntArray = np.where(filling.held > 0, np.maximum(before, filling.ready) + ring(filling.held), before)
        return flat if beside else flat + (self.backward if whole else self.weight_grad)

    def _fill(self, whole: bool, beside: bool) -> "_BucketFill":
        """How the buckets fill: whatever the devices and the links, the same."""
        grid, stops = self.grid, np.array(self.grid.cuts)
        held, ready = (np.zeros(grid.num_places, dtype=np.int64) for _ in range(2))
        left = np.zeros((2, grid.num_places, grid.num_places), dtype=np.int64)
        full: list[tuple[IntArray, IntArray, IntArray]] = []
        counts = [0] * grid.num_places
        place = grid.num_places - 2
        for layer in reversed(range(len(self.profile.layers))):
            num_bytes = self.profile.layers[layer].param_bytes
            if num_bytes:
                inside = stops > layer
                held = np.where(inside, held + num_bytes, held)
                at = np.full_like(stops, layer)
                last = np.maximum(stops, at)
                done = self._whole_ns(at, last) if whole else self._part_ns(self._weight_grad, at, last)
                ready = np.where(inside, done, ready) if beside else ready
                fills = np.flatnonzero(held >= BUCKET_BYTES)
                if len(fills):
                    full.append((fills, held[fills], ready[fills]))
                    counts[place] += 1
                    held[fills] = 0
            if layer == grid.cuts[place]:
                left[0, place], left[1, place] = held, ready
                place -= 1
        return _BucketFill(
            full=tuple(full),
            num_full=tuple(counts),
            held=left[0][grid.starts, grid.ends],
            ready=left[1][grid.starts, grid.ends],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketFill:
    """How the all-reduce buckets of every run fill.

    Attributes:
        full: last layers first, where they run over: the ends of those runs as places, their bytes, and when they are
            ready.
        num_full: how many of these lie from each place to the next.
        held, ready: what is left for the last bucket, run by run, and when it is ready.
    """

    full: tuple[tuple[IntArray, IntArray, IntArray], ...]
    num_full: tuple[int, ...]
    held: IntArray
    ready: IntArray


def _sums(values: Sequence[int]) -> IntArray:
    return np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])


def transfer_ns(link: Bandwidth, num_bytes: IntArray) -> IntArray:
    """Returns the time of messages, none for no bytes; at most 2^46 ns, half a day."""
    wide = num_bytes if int(num_bytes.max(initial=0)) < 2**32 else num_bytes.astype(object)
    times = link.latency_ns - (-wide * 1_000_000_000 // link.bytes_per_s)
    found: IntArray = np.where(num_bytes > 0, np.minimum(times, INF >> 14), 0).astype(np.int64)
    return found


def at_speed(times_ns: IntArray, speed: float) -> IntArray:
    """Returns each time divided by the speed, rounded half up, exactly; at most 2^46 ns, half a day."""
    if speed == 1.0:
        return times_ns
    exact = Fraction(str(speed))
    top, bottom = exact.denominator, exact.numerator
    wide = times_ns.astype(object) if int(np.abs(times_ns).max(initial=0)) * 2 * top + bottom >= 1 << 62 else times_ns
    found: IntArray = np.minimum((2 * wide * top + bottom) // (2 * bottom), INF >> 14).astype(np.int64)
    return found
