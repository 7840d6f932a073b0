"""Sums over layers, and transfers over cuts: lower bounds for every plan on some devices."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bapipe.formats.cluster import Bandwidth, Link
from bapipe.formats.measurement import LayerMeasurement
from bapipe.planner.compute.arrays import Floats
from bapipe.planner.device_line.line import DeviceLine
from bapipe.planner.device_line.savings import with_returned
from bapipe.planner.inputs.scalable_times import scalable_times
from bapipe.planner.stages.intervals import IntArray
from bapipe.schedules import splits_backwards
from bapipe.simulator.interval_costs import cut_bytes, gradient_crosses, prefix_sums
from bapipe.simulator.stage_cost import BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeSums:
    """Prefix sums over the layers before each boundary, the minimum over some kinds of devices for each. [boundaries]

    Times are scaled to the speeds of `LayerSums`.

    Attributes:
        critical: the part of a backward that earlier stages wait for.
        work: forward plus backward.
        trip: forward plus critical.
        first_bucket: B until the first bucket of a stage that ends there is full; the minimum over this and all later
            ends, so that a longer stage never seems shorter.
        before_gradients: B of the layers before the first one at or after the boundary that has gradients: a bucket
            that is not full waits for that layer, not for those before it.
        least_shares: the minimum shares of forward and of critical in the work of any layers.
    """

    forward: Floats
    backward: Floats
    critical: Floats
    work: Floats
    trip: Floats
    first_bucket: Floats
    before_gradients: Floats
    least_shares: tuple[float, float]


class LayerSums:
    """Lower bounds on what the layers and cuts of a line take, for one schedule and micro-batch size.

    Attributes:
        speeds: of the devices. That of a kind is its maximum, over the layers, of the time on the layer's fastest kind
            divided by its own: so at speed 1 no layer takes less than on its fastest kind, and some layer as long.
        has_one_kind: whether the devices differ in speed only.
        has_one_speed: whether all devices are equal.
        least: sums over all kinds of devices.
        state, stash: bytes of the layers before each boundary: parameters, gradients and states of the optimizer, and
            what one micro-batch leaves for its backward. [boundaries]
        held: `stash` plus what comes back to a stage that ends there; the minimum over this and all later ends.
        returned: bytes of a micro-batch that come back to a stage that ends there. [boundaries]
        least_received: the minimum bytes of a micro-batch that a stage other than the first receives.
        min_bucket, max_bucket: lower bound on the bytes of the last bucket of any stage; bytes that no bucket reaches.
        hosts_before: how many times the host changes before each device. [devices]
        boundaries_before: the same if the devices of each host are consecutive and no pair has its own link; else 0.
            [devices]
        send_ns, back_ns: what one micro-batch and its gradient take over each inner cut, on the fastest link. [cuts]
        between_hosts_ns: the same on a link between hosts. [2, cuts]
        fastest_link: the minimum latency and the maximum rate of all links, maybe not of the same one.
    """

    def __init__(self, line: DeviceLine, schedule: str, size: int, num_devices: int) -> None:
        self.line, self.schedule, self.size, self.num_devices = line, schedule, size, num_devices
        self.num_microbatches = line.options.minibatch_size // size
        self._kinds = sorted({device.kind for device in line.cluster.devices})
        self._of_kinds: dict[frozenset[str], TimeSums] = {}
        self._measure()
        self._sum_bytes()
        self.least = self.on_kinds(self._kinds)
        self._transfers()

    def _measure(self) -> None:
        """Computes the speeds of the devices, and each layer's times on each kind of device, scaled to its speed."""
        profiles = [self.line.profiles[kind] for kind in self._kinds]
        measured = [scalable_times(profile, self.size, self.line.cluster) for profile in profiles]
        times = np.array([[_times(layer) for layer in of_kind] for of_kind in measured], dtype=float)
        least = times.min(axis=0)
        of_kind = [float(np.max(least[own > 0] / own[own > 0], initial=0.0)) or 1.0 for own in times]
        devices = self.line.cluster.devices[: self.num_devices]
        relative = dict(zip(self._kinds, of_kind, strict=True))
        self.speeds = np.array([device.speed * relative[device.kind] for device in devices])
        self.max_speed = float(self.speeds.max())
        self.is_rounded = {device.speed for device in devices} != {1.0}
        self.has_one_kind = len(self._kinds) == 1
        self.has_one_speed = len(set(self.speeds.tolist())) == len(self._kinds) == 1
        scaled = times * np.array(of_kind)[:, None, None]
        if not splits_backwards(self.schedule):
            scaled[:, :, 2] = scaled[:, :, 1]
        elif not gradient_crosses(profiles[0])[self.line.cuts[1:-1]].all():
            # A stage that sends no gradient back has no I: the first one, whose W ends the way back instead, or one
            # that begins at such a cut.
            scaled[:, :, 2] = 0.0
        self._times = scaled  # forward, backward and critical. [kinds, layers, 3]

    def on_kinds(self, kinds: Iterable[str]) -> TimeSums:
        """Returns the sums with each layer on the one of `kinds` where it takes the minimum."""
        chosen = frozenset(kinds)
        if chosen not in self._of_kinds:
            self._of_kinds[chosen] = self._sum_times(self._times[[kind in chosen for kind in self._kinds]].min(axis=0))
        return self._of_kinds[chosen]

    def _sum_times(self, times: Floats) -> TimeSums:
        """Sums the times of layers: forward, backward and critical. [layers, 3]"""
        ends = np.array(self.line.cuts)
        of_layers = np.concatenate([np.zeros((1, 3)), np.cumsum(times, axis=0)])
        forward, backward, critical = of_layers[ends].T
        until_full = backward - of_layers[np.maximum(self._first_of_bucket, 0), 1]
        until_full[self._first_of_bucket < 0] = np.inf
        work = forward + backward
        of_cuts = np.diff(work)
        shares = [np.diff(sums)[of_cuts > 0] / of_cuts[of_cuts > 0] for sums in (forward, critical)]
        return TimeSums(
            forward=forward,
            backward=backward,
            critical=critical,
            work=work,
            trip=forward + critical,
            first_bucket=np.minimum.accumulate(until_full[::-1])[::-1],
            before_gradients=of_layers[self._first_gradients, 1],
            least_shares=(shares[0].min(initial=1.0), shares[1].min(initial=1.0)),
        )

    def _sum_bytes(self) -> None:
        """Sums what layers hold and their gradients, the minimum over the kinds of devices for each. [boundaries]"""
        cuts, profiles = self.line.cuts, [self.line.profiles[kind] for kind in self._kinds]
        layers = [profile.layers for profile in profiles]

        def least(values: Sequence[Sequence[int]]) -> Floats:
            return prefix_sums(np.min(values, axis=0).tolist())[cuts].astype(float)

        stashes = [[m.stash_bytes for m in profile.at(self.size)] for profile in profiles]
        self.stash = least(stashes)
        self.state = least(
            [[x.param_bytes + x.gradient_bytes + x.optimizer_state_bytes for x in of_kind] for of_kind in layers]
        )
        fastest = max(device.speed for device in self.line.cluster.devices)
        self.update = least([[layer.update_ns for layer in of_kind] for of_kind in layers]) / fastest
        gradients = [[layer.gradient_bytes for layer in of_kind] for of_kind in layers]
        self.gradients = least(gradients)
        self._sum_buckets(np.array(gradients))

    def _sum_buckets(self, gradient_bytes: IntArray) -> None:
        """Finds where the first bucket of a stage that ends at each boundary begins, and the limits of bucket bytes.

        The first bucket holds the last layers, back to the one whose gradients fill it, by each layer's maximum.

        Args:
            gradient_bytes: of each layer on each kind of device. [kinds, layers]
        """
        ends = np.array(self.line.cuts)
        most = prefix_sums(gradient_bytes.max(axis=0).tolist()).astype(float)
        # -1: they do not fill a bucket.
        self._first_of_bucket = np.searchsorted(most, most[ends] - BUCKET_BYTES, side="right") - 1
        has_gradients = np.append(np.flatnonzero(gradient_bytes.min(axis=0) > 0), gradient_bytes.shape[1])
        self._first_gradients = has_gradients[np.searchsorted(has_gradients, np.minimum(ends, gradient_bytes.shape[1]))]
        self.min_bucket = int(gradient_bytes.min())
        self.max_bucket = BUCKET_BYTES + int(gradient_bytes.max())

    def round_trip_ns(self, num_cuts: int) -> float:
        """Returns a lower bound on one micro-batch's transfers over `num_cuts` cuts, both ways."""
        return float(self._both_ways[min(num_cuts, self._both_ways.size - 1)])

    def _transfers(self) -> None:
        """Computes lower bounds on transfers over 0, 1, 2 ... cuts, one and both ways [cuts]; and host boundaries."""
        cluster, interior = self.line.cluster, self.line.cuts[1:-1]
        sizes = [cut_bytes(self.line.profiles[kind], self.size) for kind in self._kinds]
        send = np.min([np.array(forward)[interior] for forward, _ in sizes], axis=0)
        grad = np.min([np.array(back)[interior] for _, back in sizes], axis=0)
        links: list[Bandwidth | Link] = [cluster.intra_host, cluster.inter_host, *cluster.links]
        rate, latency = max(link.bytes_per_s for link in links), min(link.latency_ns for link in links)

        def times(num_bytes: IntArray, latency: int = latency, rate: int = rate) -> Floats:
            return np.where(num_bytes > 0, latency + num_bytes * 1e9 / rate, 0.0)

        zero = [0.0]
        self._one_way = np.concatenate([zero, np.cumsum(np.sort(times(send)))])
        self._both_ways = np.concatenate([zero, np.cumsum(np.sort(times(send) + times(grad)))])
        self.send_ns, self.back_ns = times(send), times(grad)
        self.least_received = int(send.min()) if send.size else 0
        self.returned = np.concatenate([zero, grad, zero])  # nothing to the last stage
        self.held = with_returned(self.stash, self.returned)
        # If the devices of each host are consecutive, a transfer over a host boundary takes the slower link.
        hosts = [device.host for device in cluster.devices[: self.num_devices]]
        crossings = [a != b for a, b in pairwise(hosts)]
        in_a_row = sum(crossings) + 1 == len(set(hosts)) and not cluster.links
        self.hosts_before = np.concatenate([[0], np.cumsum(crossings, dtype=np.int64)])
        self.boundaries_before = self.hosts_before * in_a_row
        between = max(cluster.inter_host.latency_ns, latency), min(cluster.inter_host.bytes_per_s, rate)
        self.between_hosts_ns = np.stack([times(send, *between), times(grad, *between)])
        slower = max(cluster.inter_host.latency_ns - latency, 0) if send.size and send.min() > 0 else 0.0
        extra_rate = max(1e9 / cluster.inter_host.bytes_per_s - 1e9 / rate, 0.0)
        self._extra_one_way = slower + float(send.min(initial=2**60)) * extra_rate if send.size else 0.0
        both_slower = slower if grad.size == 0 or grad.min() == 0 else 2 * slower  # without gradients none are sent
        self._extra_both = both_slower + float((send + grad).min()) * extra_rate if send.size else 0.0
        self.fastest_link = Bandwidth(bytes_per_s=rate, latency_ns=latency)


def _times(layer: LayerMeasurement) -> tuple[int, ...]:
    """Returns a layer's times for bounds: forward, backward, and the part of it that earlier stages wait for."""
    return layer.forward_ns, layer.min_backward_ns, layer.min_input_grad_ns
