"""What a device does in a step when the pipeline never runs dry: its load.

Of M micro-batches a device of a stage with r devices runs c = ceil(M / r), and receives and sends what they need:

  compute    c (F + B) + update + all-reduce of the stage's gradients, 2(r-1)(latency + ceil(bytes/r) / bandwidth)
  transfers  c times each: activations in, gradients back, activations out, gradients in

On a device that overlaps transfers the load is the largest of these, else their sum. A tensor used further on is
relayed. Stashes in flight are those of 1F1B over devices: ceil(w / r) where w devices run the stage and what follows.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET

from bapipe.formats.cluster import Bandwidth
from bapipe.formats.profile import ModelProfile
from bapipe.graph.layer_graph import members

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

NOTHING_FITS = np.int64(1 << 61)
"""The load of a stage that does not fit its devices, or that there is not."""


class Cuts:
    """The boundaries between which stages may lie, which of them hold which others, and the layers in each."""

    def __init__(self, boundaries: Sequence[int], parts: Sequence[Sequence[int]], num_layers: int) -> None:
        self.boundaries = tuple(boundaries)
        inside = np.zeros((len(boundaries), num_layers), dtype=np.int64)
        for row, nodes in enumerate(boundaries):
            inside[row, [layer for node in members(nodes) for layer in parts[node]]] = 1
        self.inside: Integers = inside
        num_inside = inside.sum(axis=1)
        self.nested = np.triu(np.ones((len(boundaries),) * 2, dtype=bool), 1)
        if any(smaller & ~larger for smaller, larger in pairwise(boundaries)):  # else they are a chain
            floats = inside.astype(np.float64)
            self.nested &= floats @ floats.T == num_inside[:, None]

    @property
    def num_boundaries(self) -> int:
        return len(self.boundaries)

    def layers(self, begin: int, end: int) -> list[int]:
        """Returns the layers between two boundaries, ascending."""
        return [int(i) for i in np.nonzero(self.inside[end] - self.inside[begin])[0]]


class Runs:
    """Figures of the layers between any two boundaries, at one micro-batch size, on devices of one kind and speed."""

    def __init__(self, cuts: Cuts, profile: ModelProfile, microbatch_size: int, speed: float) -> None:
        measured, inside = profile.at(microbatch_size), cuts.inside
        self._speed = Fraction(str(speed))
        self._forward = inside @ np.array([m.forward_ns for m in measured])
        self._input_grad = inside @ np.array([m.input_grad_ns for m in measured])
        self._weight_grad = inside @ np.array([m.weight_grad_ns for m in measured])
        self._backward = inside @ np.array([m.whole_backward_ns for m in measured])
        self._whole = inside @ np.array([m.backward_ns is not UNSET for m in measured], dtype=np.int64)
        self._update = inside @ np.array([layer.update_ns for layer in profile.layers])
        self._params = inside @ np.array([layer.param_bytes for layer in profile.layers])
        self._optimizer = inside @ np.array([layer.optimizer_state_bytes for layer in profile.layers])
        self._stash = inside @ np.array([m.stash_bytes for m in measured])
        self._inside = inside
        self._workspaces = np.array([m.workspace_bytes for m in measured])
        self.send_bytes, self.grad_bytes = _alive(inside, profile, microbatch_size)

    def _at_speed(self, time_ns: Any) -> Any:
        if self._speed == 1:
            return time_ns
        up, down = self._speed.numerator, self._speed.denominator
        return (2 * time_ns * down + up) // (2 * up)

    def microbatch_ns(self, begin: Any, end: Any) -> Any:
        """Returns F + B of one micro-batch, rounded as the judge rounds them."""
        forward, whole = (self._at_speed(sums[end] - sums[begin]) for sums in (self._forward, self._backward))
        if self._speed == 1:
            return forward + whole
        split = sum(self._at_speed(sums[end] - sums[begin]) for sums in (self._input_grad, self._weight_grad))
        return forward + np.where(self._whole[end] > self._whole[begin], whole, split)

    def once_ns(self, begin: Any, end: Any, devices: Any, ring: Bandwidth) -> Any:
        """Returns the update and the all-reduce, once a step."""
        params = self._params[end] - self._params[begin]
        update = self._at_speed(self._update[end] - self._update[begin])
        share = -(-params // devices)
        turn = message_ns(share, ring)
        return update + np.where((devices > 1) & (params > 0), 2 * (devices - 1) * turn, 0)

    def most_bytes(self, in_flight: int, microbatches: int) -> int:
        """Returns what no device holds more than."""
        held = 2 * self._params[-1] + self._optimizer[-1] + in_flight * self._stash[-1] + self._workspaces.max()
        return int(held + microbatches * (self.send_bytes.max() + self.grad_bytes.max()))

    def fits(self, begin: Any, end: Any, in_flight: Any, microbatches: Any, limit_bytes: int) -> Any:
        """Returns whether a device can hold the layers, so many stashes, and what so many micro-batches receive."""
        held = 2 * (self._params[end] - self._params[begin]) + self._optimizer[end] - self._optimizer[begin]
        buffers = microbatches * (self.send_bytes[begin] + self.grad_bytes[end])
        room = np.asarray(limit_bytes - (held + in_flight * (self._stash[end] - self._stash[begin]) + buffers))
        fits = room >= self._workspaces.max()
        unsure = np.nonzero((room >= 0) & ~fits)
        if unsure[0].size:
            begins, ends = np.broadcast_arrays(begin, end)
            for some in np.array_split(np.arange(unsure[0].size), unsure[0].size // 4096 + 1):
                pairs = tuple(axis[some] for axis in unsure)
                largest = ((self._inside[ends[pairs]] - self._inside[begins[pairs]]) * self._workspaces).max(axis=1)
                fits[pairs] = room[pairs] >= largest
        return fits


def most_ns(
    cuts: Cuts, runs: Sequence[Runs], num_microbatches: int, num_devices: int, links: Sequence[Bandwidth]
) -> float:
    """Returns a load that every plan is below: everything on the slowest device, over the slowest link."""
    last = cuts.num_boundaries - 1
    worst = 1
    for link in links:
        for own in runs:
            once = num_devices * int(own.once_ns(0, last, np.int64(2), link))
            cut = int(max(transfer_ns(own.send_bytes, link).max(), transfer_ns(own.grad_bytes, link).max()))
            each = int(own.microbatch_ns(0, last)) + 2 * num_devices
            worst = max(worst, num_microbatches * (each + 4 * cut) + once + 1)
    return float(2 * worst)


def transfer_ns(num_bytes: Any, link: Bandwidth) -> Any:
    """Returns the time of one transfer of each of many sizes; no bytes take none."""
    return np.where(num_bytes > 0, message_ns(num_bytes, link), 0)


def message_ns(num_bytes: Any, link: Bandwidth) -> Any:
    """Returns latency and bytes over bandwidth, exact where their product is more than 64 bits hold; at most 2^60."""
    sizes = np.asarray(num_bytes)
    wide = sizes if np.abs(sizes).max(initial=0) < 2**33 else sizes.astype(object)
    return np.minimum(link.latency_ns - (-wide * 1_000_000_000 // link.bytes_per_s), 2**60).astype(np.int64)


def _alive(inside: "Integers", profile: ModelProfile, microbatch_size: int) -> "tuple[Integers, Integers]":
    """Activation and gradient bytes that cross each boundary."""
    send = np.zeros(len(inside), dtype=np.int64)
    grad = np.zeros(len(inside), dtype=np.int64)
    users: dict[str, list[int]] = {}
    for i, layer in enumerate(profile.layers):
        for tensor in layer.inputs:
            users.setdefault(tensor, []).append(i)
    for i, (layer, measured) in enumerate(zip(profile.layers, profile.at(microbatch_size), strict=True)):
        for tensor, num_bytes in zip(layer.outputs, measured.output_bytes, strict=True):
            if tensor in users:
                missing = inside[:, users[tensor]].min(axis=1) == 0
                crosses = (inside[:, i] == 1) & missing
                send += num_bytes * crosses
                grad += 0 if tensor in layer.no_gradient else num_bytes * crosses
    return send, grad


class AlikeDevices:
    """Pipelines over devices that are all alike, as an `AlikeProblem`."""

    def __init__(
        self,
        cuts: Cuts,
        runs: Runs,
        *,
        num_devices: int,
        num_microbatches: int,
        link: Bandwidth,
        overlaps: bool,
        memory_bytes: int,
        most_replicas: int | None = None,
    ) -> None:
        self._cuts, self._runs, self._link, self._overlaps, self._memory = cuts, runs, link, overlaps, memory_bytes
        self.num_boundaries, self._num_microbatches = cuts.num_boundaries, num_microbatches
        self.num_devices, self._most = num_devices, min(most_replicas or num_devices, num_microbatches)
        self._last = cuts.num_boundaries - 1
        self._sent = transfer_ns(runs.send_bytes, link)
        self._back = transfer_ns(runs.grad_bytes, link)
        self.looks_ahead = runs.most_bytes(self.num_devices, num_microbatches) > memory_bytes

    @property
    def bound_ns(self) -> float:
        """All micro-batches shared out among all devices; stages' F and B are rounded."""
        total = int(self._runs.microbatch_ns(0, self._last)) - 2 * self.num_devices
        return max(0.0, self._num_microbatches * total / self.num_devices)

    @property
    def ceiling_ns(self) -> float:
        """A load that every plan is below."""
        return most_ns(self._cuts, [self._runs], self._num_microbatches, self.num_devices, [self._link])

    def loads(self, devices: Any, begin: Any, end: Any) -> Any:
        """Returns the loads of stages, of the shape of the arguments."""
        times = -(-self._num_microbatches // devices)
        once = self._runs.once_ns(begin, end, devices, self._link)
        compute = times * self._runs.microbatch_ns(begin, end) + once
        transfers = [times * cut for cut in (self._sent[begin], self._back[begin], self._sent[end], self._back[end])]
        if self._overlaps:
            return np.maximum.reduce([compute, *np.broadcast_arrays(compute, *transfers)[1:]])
        return compute + sum(transfers)

    def load(self, devices: int, begin: int, end: int) -> float:
        return int(self.loads(devices, begin, end))

    def fits(self, devices: Any, begin: Any, end: Any, after: Any) -> Any:
        """Returns whether a stage fits where `after` more devices run what follows."""
        times = -(-self._num_microbatches // devices)
        in_flight = np.minimum(-(-(after + devices) // devices), times)
        return self._runs.fits(begin, end, in_flight, times, self._memory)

    def fewest(self, begin: Any, end: Any, after: Any, room: Any, limit: float) -> Any:
        """Begins where F, B and transfers alone are below the limit, and adds devices while the load is not."""
        least = np.full((begin.size, end.size), self.num_devices + 1, dtype=np.int64)
        rows, columns = np.nonzero(self._cuts.nested[np.ix_(begin, end)] & (room > 0))
        first, last, rest = begin[rows], end[columns], np.broadcast_to(after, least.shape)[rows, columns]
        most = np.minimum(self._most, room[rows, columns])  # more than micro-batches would have nothing to do
        each = self._runs.microbatch_ns(first, last)
        for cut in (self._sent[first], self._back[first], self._sent[last], self._back[last]):
            each = np.maximum(each, cut)
        devices = np.maximum((each * (self._num_microbatches / limit) * (1 - 1e-9)).astype(np.int64), 1)
        while True:
            near = devices <= most
            rows, columns, first, last, rest, most, devices = (
                kept[near] for kept in (rows, columns, first, last, rest, most, devices)
            )
            if not devices.size:
                return least
            good = self.loads(devices, first, last) < limit
            if self.looks_ahead:
                good[good] = self.fits(devices[good], first[good], last[good], rest[good])
            least[rows[good], columns[good]] = devices[good]
            devices = np.where(good, self.num_devices + 1, devices + 1)

    def devices_around(self, limit: float) -> Any:
        everywhere = np.arange(self.num_boundaries)
        slack = 2 * self.num_devices  # F and B of each stage are rounded
        needs = self._num_microbatches / limit * (1 - 1e-9)
        across = np.maximum(self._sent, self._back)
        before = np.maximum(self._runs.microbatch_ns(0, everywhere) - slack, across)
        after = np.maximum(self._runs.microbatch_ns(everywhere, self._last) - slack, across)
        return np.ceil(np.stack([before, after]) * needs).clip(0).astype(np.int64)
