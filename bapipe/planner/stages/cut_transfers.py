"""Times of the transfers between two stages, if the cut between them is at each boundary. [boundaries]"""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from bapipe.formats.cluster import Bandwidth
from bapipe.planner.stages.devices import ClassLinks, DeviceClass
from bapipe.planner.stages.intervals import MAX_TIME, IntArray, greatest_of, least_of
from bapipe.planner.stages.placements import StagePlacement
from bapipe.simulator.interval_costs import transfer_ns


class CutTransfers:
    """The transfers between the stages of all placements at one micro-batch size."""

    def __init__(
        self, classes: Sequence[DeviceClass], links: ClassLinks, min_send_bytes: IntArray, min_grad_bytes: IntArray
    ) -> None:
        """Makes the transfers between devices of some classes.

        Args:
            min_send_bytes, min_grad_bytes: activations and gradients of a micro-batch that cross each boundary; the
                minimum over the kinds of devices. [boundaries]
        """
        self.classes, self.links = classes, links
        self._min_send_bytes, self._min_grad_bytes = min_send_bytes, min_grad_bytes
        self._transfer_ns: dict[tuple[Bandwidth, bool], IntArray] = {}
        self._between: dict[Hashable, tuple[IntArray, IntArray]] = {}

    def between(self, placement: StagePlacement, successor: StagePlacement, forward: bool) -> tuple[IntArray, IntArray]:
        """Returns two times of the activations sent to the next stage or, if not `forward`, of the gradients sent back.

        The minimum time of one micro-batch, and the time of all micro-batches that cross the busiest link. Both are
        lower bounds. [boundaries]
        """
        if placement.position is not None and placement.position == successor.position:
            zeros = np.zeros(len(self._min_send_bytes), dtype=np.int64)  # two stages on one device
            return zeros, zeros
        num_microbatches = placement.schedule.num_microbatches
        key = (placement.device_classes, successor.device_classes, num_microbatches, forward)
        if key not in self._between:
            counts = _microbatches_per_link(placement, successor)
            # Gradients go back between the same pairs of devices, from the successor to the placement.
            directed = {pair: pair if forward else pair[::-1] for pair in counts}
            times = {
                pair: self._cut_transfer_ns(self.links.between([a], [b])[0], forward)
                for pair, (a, b) in directed.items()
            }
            # One micro-batch may cross the fastest link; the busiest link limits all of them (bound "link").
            busiest = greatest_of(count * times[pair] for pair, count in counts.items())
            self._between[key] = least_of(times.values()), busiest
        return self._between[key]

    def blocks_on_transfers(self, placement: StagePlacement) -> bool:
        """Returns whether no replica can compute while it transfers; False for devices with several stages."""
        return placement.position is None and not any(
            self.classes[c].device.overlaps_transfers for c in placement.device_classes
        )

    def min_entry_ns(self, placement: StagePlacement, forward: bool) -> IntArray:
        """Returns the minimum transfer time from any previous stage or, if not `forward`, back to it. [boundaries]

        It is 0 at the start of the chain, where nothing is sent.
        """
        # The cost-to-go does not know the previous stage: take the fastest link from any device of the cluster.
        others = range(len(self.classes))
        here = placement.device_classes
        sources, targets = (others, here) if forward else (here, others)
        if not self.links.between(sources, targets):
            return np.zeros(len(self._min_send_bytes), dtype=np.int64)
        times = self.min_ns(sources, targets, forward).copy()
        times[0] = 0
        return times

    def min_ns(self, sources: Iterable[int], targets: Iterable[int], forward: bool) -> IntArray:
        """Returns the minimum transfer time from a device of the source classes to one of the target classes.

        [boundaries]
        """
        return least_of(self._cut_transfer_ns(link, forward) for link in self.links.between(sources, targets))

    def _cut_transfer_ns(self, link: Bandwidth, forward: bool) -> IntArray:
        """Returns the transfer time of a micro-batch over a link, for each boundary. [boundaries]"""
        key = (link, forward)
        if key not in self._transfer_ns:
            num_bytes = self._min_send_bytes if forward else self._min_grad_bytes
            self._transfer_ns[key] = transfer_ns(num_bytes, link, MAX_TIME)
        return self._transfer_ns[key]


def _microbatches_per_link(placement: StagePlacement, successor: StagePlacement) -> dict[tuple[int, int], int]:
    """Returns how many micro-batches cross one link between two stages, by the classes (source, target) of its ends.

    Micro-batch m goes from replica m mod R to replica m mod R', so the pairs repeat with period lcm(R, R').

    If each stage has devices of one class, this is the maximum over the links. Otherwise it is the minimum over all
    pairs that exchange micro-batches, because that does not change if symmetric classes, and so the order of the
    devices, are exchanged.
    """
    num = placement.schedule.num_microbatches
    senders, receivers = placement.device_classes, successor.device_classes
    # Each of the `period` pairs of replicas gets every period-th micro-batch: floor(num / period) or one more.
    period = int(np.lcm(len(senders), len(receivers)))
    if len(set(senders)) > 1 or len(set(receivers)) > 1:
        return {(senders[m % len(senders)], receivers[m % len(receivers)]): num // period for m in range(period)}
    return {(senders[0], receivers[0]): -(-num // period)}
