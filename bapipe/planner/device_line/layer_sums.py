"""Sums over layers, and transfers over cuts, that every plan on some devices has at least."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from bapipe.formats.cluster import Bandwidth, Link
from bapipe.formats.profile import LayerMeasurement
from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.device_line.line import DeviceLine
from bapipe.planner.device_line.replica_weights import FloatArray
from bapipe.schedules import ALL
from bapipe.schedules.table import Phase
from bapipe.simulator.interval_costs import cut_bytes, gradient_crosses, prefix_sums
from bapipe.simulator.stage_cost import BUCKET_BYTES


class LayerSums:
    """What the layers and cuts of a line take at least, for one schedule and micro-batch size.

    Attributes:
        speeds: of the devices; each takes at least as long, for any layer, as the fastest kind for it at that speed.
    """

    def __init__(self, line: DeviceLine, schedule: str, size: int, num_devices: int) -> None:
        self.line, self.schedule, self.size, self.num_devices = line, schedule, size, num_devices
        self.num_microbatches = line.options.minibatch_size // size
        self._sum_layers()
        self._transfers()

    def _sum_layers(self) -> None:
        """Prefix sums at the boundaries, each layer on the kind of device where it takes the least. [boundaries]"""
        kinds = sorted({device.kind for device in self.line.cluster.devices})
        profiles = [self.line.profiles[kind] for kind in kinds]
        measured = [profile.at(self.size) for profile in profiles]
        splits = splits_backwards(self.schedule)
        self._compare_kinds(dict(zip(kinds, measured, strict=True)))

        def least_of_layers(value: "Callable[[LayerMeasurement], int]") -> FloatArray:
            rows = [[value(m) for m in of_kind] for of_kind in measured]
            return prefix_sums(np.min(rows, axis=0).tolist()).astype(float)

        def least(value: "Callable[[LayerMeasurement], int]") -> FloatArray:
            return least_of_layers(value)[self.line.cuts]

        self.forward = least(lambda m: m.forward_ns)
        self._backward_of_layers = least_of_layers(
            lambda m: min(m.whole_backward_ns, m.input_grad_ns + m.weight_grad_ns)
        )
        self.backward = self._backward_of_layers[self.line.cuts]
        self.critical = least(lambda m: min(m.whole_backward_ns, m.input_grad_ns)) if splits else self.backward
        if splits and not gradient_crosses(profiles[0])[self.line.cuts[1:-1]].all():
            # A stage that sends no gradient back has no I: the first one, whose W ends the way back instead, or any
            # that begins at such a cut.
            self.critical = np.zeros_like(self.backward)
        self._stash = least(lambda m: m.stash_bytes)
        layers = [profile.layers for profile in profiles]
        state = [[x.param_bytes + x.gradient_bytes + x.optimizer_state_bytes for x in of_kind] for of_kind in layers]
        self._static = prefix_sums(np.min(state, axis=0).tolist())[self.line.cuts].astype(float)
        gradients = [[layer.gradient_bytes for layer in of_kind] for of_kind in layers]
        updates = [[layer.update_ns for layer in of_kind] for of_kind in layers]
        fastest = max(device.speed for device in self.line.cluster.devices)
        self.update = prefix_sums(np.min(updates, axis=0).tolist())[self.line.cuts] / fastest
        self._sum_buckets(np.array(gradients))
        self.work, self.trip = self.forward + self.backward, self.forward + self.critical
        work = np.diff(self.work)
        shares = [np.diff(sums)[work > 0] / work[work > 0] for sums in (self.forward, self.critical)]
        self.least_shares = shares[0].min(initial=1.0), shares[1].min(initial=1.0)

    def _sum_buckets(self, gradient_bytes: IntArray) -> None:
        """Of a stage that ends at each boundary: B until its first bucket is full; and the bytes of any bucket.

        The first bucket holds the last layers, from the last one whose gradients fill it: the largest of any kind. Of
        two ends the earlier one has the minimum of both, so that a longer stage never seems shorter. [boundaries]

        Args:
            gradient_bytes: of each layer on each kind of device. [kinds, layers]
        """
        ends = np.array(self.line.cuts)
        self.gradients = prefix_sums(gradient_bytes.min(axis=0).tolist())[ends].astype(float)
        most = prefix_sums(gradient_bytes.max(axis=0).tolist()).astype(float)
        first = np.searchsorted(most, most[ends] - BUCKET_BYTES, side="right") - 1  # -1: they do not fill a bucket
        until_full = self._backward_of_layers[ends] - self._backward_of_layers[np.maximum(first, 0)]
        until_full[first < 0] = np.inf
        self.first_bucket = np.minimum.accumulate(until_full[::-1])[::-1]
        # A bucket that is not full waits for the first layer of the stage that has gradients, not for those before it.
        has_gradients = np.append(np.flatnonzero(gradient_bytes.min(axis=0) > 0), gradient_bytes.shape[1])
        lowest = has_gradients[np.searchsorted(has_gradients, np.minimum(ends, gradient_bytes.shape[1]))]
        self.before_gradients = self._backward_of_layers[lowest]
        self._min_bucket = int(gradient_bytes.min())  # if not 0, every stage's last bucket is full at its last backward
        self._max_bucket = BUCKET_BYTES + int(gradient_bytes.max())  # no bucket is as large

    def held(self, begins: IntArray, ends: IntArray) -> FloatArray:
        """The bytes that stages hold at least: their state, and one micro-batch."""
        both: FloatArray = self._static + self._stash
        return both[ends] - both[begins]

    def round_trip_ns(self, num_cuts: int) -> float:
        """Returns what one micro-batch's transfers over some cuts take at least, both ways."""
        return float(self._both_ways[min(num_cuts, self._both_ways.size - 1)])

    def _compare_kinds(self, measured: Mapping[str, Sequence[LayerMeasurement]]) -> None:
        """Notes the speeds of the devices: that of a kind is at most what its least slow layer says."""
        times = {
            kind: np.array([time for layer in layers for time in _times(layer)], dtype=float)
            for kind, layers in measured.items()
        }
        least = np.min(list(times.values()), axis=0)
        of_kind = {
            kind: float(np.max(least[own > 0] / own[own > 0], initial=0.0)) or 1.0 for kind, own in times.items()
        }
        devices = self.line.cluster.devices[: self.num_devices]
        self.speeds = np.array([device.speed * of_kind[device.kind] for device in devices])
        self.max_speed = float(self.speeds.max())
        self.is_rounded = {device.speed for device in devices} != {1.0}

    def _transfers(self) -> None:
        """Lower bounds of the transfers of 0, 1, 2 ... cuts, one way and both ways; and host boundaries. [cuts]"""
        cluster, interior = self.line.cluster, self.line.cuts[1:-1]
        names = {device.kind for device in cluster.devices}
        sizes = [cut_bytes(self.line.profiles[kind], self.size) for kind in names]
        send = np.min([np.array(forward)[interior] for forward, _ in sizes], axis=0)
        grad = np.min([np.array(back)[interior] for _, back in sizes], axis=0)
        links: list[Bandwidth | Link] = [cluster.intra_host, cluster.inter_host, *cluster.links]
        rate, latency = max(link.bytes_per_s for link in links), min(link.latency_ns for link in links)

        def times(num_bytes: IntArray) -> FloatArray:
            return np.where(num_bytes > 0, latency + num_bytes * 1e9 / rate, 0.0)

        zero = [0.0]
        self._one_way = np.concatenate([zero, np.cumsum(np.sort(times(send)))])
        self._both_ways = np.concatenate([zero, np.cumsum(np.sort(times(send) + times(grad)))])
        # Hosts in a row: the transfer over a boundary between two of them takes the slower link.
        hosts = [device.host for device in cluster.devices[: self.num_devices]]
        crossings = [a != b for a, b in pairwise(hosts)]
        in_a_row = sum(crossings) + 1 == len(set(hosts)) and not cluster.links
        self._hosts_before = np.concatenate([[0], np.cumsum(crossings)])
        self._boundaries_before = self._hosts_before * in_a_row
        slower = max(cluster.inter_host.latency_ns - latency, 0) if send.size and send.min() > 0 else 0.0
        extra_rate = max(1e9 / cluster.inter_host.bytes_per_s - 1e9 / rate, 0.0)
        self._extra_one_way = slower + float(send.min(initial=2**60)) * extra_rate if send.size else 0.0
        both_slower = slower if grad.size == 0 or grad.min() == 0 else 2 * slower  # without gradients none are sent
        self._extra_both = both_slower + float((send + grad).min()) * extra_rate if send.size else 0.0
        self._fastest_link = Bandwidth(bytes_per_s=rate, latency_ns=latency)  # the links of no two devices, maybe


@cache
def splits_backwards(schedule: str) -> bool:
    """Returns whether a schedule runs the two parts of a backward, I and W, as actions of their own."""
    return any(action.phase is Phase.WEIGHT_GRAD for order in ALL[schedule](2, 2).order for action in order)


def _times(layer: LayerMeasurement) -> tuple[int, ...]:
    """The times of a layer that bounds add up."""
    split = layer.input_grad_ns + layer.weight_grad_ns
    return (
        layer.forward_ns,
        min(layer.whole_backward_ns, split),
        min(layer.whole_backward_ns, layer.input_grad_ns),
    )
