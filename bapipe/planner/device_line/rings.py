"""Lower bounds on the time to sum the gradients of a stage over its devices."""

import numpy as np
from msgspec import UNSET

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.device_line.layer_sums import LayerSums
from bapipe.planner.stages.intervals import IntArray


class Rings:
    """The rings of stages by their first device and the class of their numbers of devices. [positions, classes]

    Attributes:
        latency, rate: the time for each bucket, in ns, and for its bytes, in ns per byte.
        last_ns: the ring of a stage's last bucket, which nothing hides.
    """

    def __init__(self, sums: LayerSums, fewest: IntArray, *, may_be_idle: bool) -> None:
        """`fewest`: the minimum devices of each class. If devices may be idle, a stage's hosts are unknown."""
        cluster, num_devices = sums.line.cluster, sums.num_devices
        self._max_bucket = sums.max_bucket
        hosts = [device.host for device in cluster.devices[:num_devices]]
        per_host = max(hosts.count(host) for host in set(hosts))
        positions = np.arange(num_devices)[:, None]
        last = np.minimum(positions + fewest - 1, num_devices - 1)
        crosses = sums.hosts_before[last] > sums.hosts_before[positions]
        leaves = (fewest > per_host) | (crosses & (not may_be_idle))
        is_counted = cluster.intra_host_sum is UNSET and not cluster.links
        steps = 2 * (fewest - 1) * is_counted
        between, fastest = cluster.inter_host, sums.fastest_link
        self.latency = np.where(leaves, between.latency_ns, fastest.latency_ns) * steps
        self.rate = np.where(leaves, 1e9 / between.bytes_per_s, 1e9 / fastest.bytes_per_s) * steps / fewest
        self.last_ns = (self.latency + self.rate * sums.min_bucket) * (sums.min_bucket > 0)
        self._least_latency, self._least_rate = self.latency.min(axis=0), self.rate.min(axis=0)  # [classes]

    def least_ns(self, class_number: int, gradient_bytes: Floats) -> Floats:
        """Returns a lower bound on the time of all rings of a stage with devices of a class, wherever it begins."""
        latency, rate = self._least_latency[class_number], self._least_rate[class_number]
        rings: Floats = latency * np.ceil(gradient_bytes / self._max_bucket) + rate * gradient_bytes
        return rings
