"""What the devices of a stage hold, from sums over the layers, without a table of actions."""

from collections.abc import Sequence

import numpy as np

from bapipe.planner.device_line.line import DeviceLine
from bapipe.simulator.interval_costs import cut_bytes, prefix_sums


class StageMemory:
    """Says whether stages fit, for one micro-batch size. Tied weights and kinds with other sizes are left out."""

    def __init__(self, line: DeviceLine, microbatch_size: int) -> None:
        self.line, self.num_microbatches = line, line.options.minibatch_size // microbatch_size
        profile = line.profiles[min(device.kind for device in line.cluster.devices)]
        measured = profile.at(microbatch_size)
        state = [x.param_bytes + x.gradient_bytes + x.optimizer_state_bytes for x in profile.layers]
        # Sums over the layers before each one, and the bytes that pass each cut. [layers + 1]
        self.static, self.stash = prefix_sums(state), prefix_sums([m.stash_bytes for m in measured])
        self.sent, self.returned = (np.asarray(of_cuts) for of_cuts in cut_bytes(profile, microbatch_size))
        self.workspace = np.array([m.workspace_bytes for m in measured])

    def in_flight(self, schedule: str, num_behind: int, num_replicas: int) -> int:
        """Returns how many micro-batches a replica holds at most: under GPipe all, else as under 1F1B.

        Args:
            num_behind: the number of devices from this stage on.
        """
        depth = self.num_microbatches if schedule == "gpipe" else min(num_behind, self.num_microbatches)
        return -(-depth // num_replicas)

    def recomputes(self, begin: int, end: int, ranks: Sequence[int], in_flight: int) -> bool | None:
        """Returns whether the layers [begin, end) must recompute on some devices; None if they do not fit even so."""
        limit = min(self.line.limits[rank] for rank in ranks)
        if self._held(begin, end, len(ranks), in_flight, recomputes=False) <= limit:
            return False
        if self.line.options.recompute and self._held(begin, end, len(ranks), in_flight, recomputes=True) <= limit:
            return True
        return None

    def _held(self, begin: int, end: int, num_replicas: int, in_flight: int, *, recomputes: bool) -> int:
        """Bytes of a device: parameters, stashes, or inputs and one stash, and receive buffers."""
        stash, received = int(self.stash[end] - self.stash[begin]), int(self.sent[begin]) if begin else 0
        kept = in_flight * received + stash if recomputes else in_flight * stash
        returned = int(self.returned[end]) if end < self.stash.size - 1 else 0
        held = int(self.static[end] - self.static[begin]) + int(self.workspace[begin:end].max())
        return held + kept + -(-self.num_microbatches // num_replicas) * (received + returned)
