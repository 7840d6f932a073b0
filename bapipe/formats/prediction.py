"""One step of a plan as the simulator predicts it: its time, and what each device does and holds."""

import msgspec

from bapipe.units import NonNegative, NonNegativeFloat


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a device at its peak, in bytes.

    Attributes:
        buffers: the receive buffers at the stage boundaries.
    """

    params: NonNegative
    gradients: NonNegative
    optimizer: NonNegative
    stash: NonNegative
    workspace: NonNegative
    buffers: NonNegative

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.optimizer + self.stash + self.workspace + self.buffers


NO_MEMORY = Memory(params=0, gradients=0, optimizer=0, stash=0, workspace=0, buffers=0)


class RankPrediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device in one step.

    Attributes:
        busy_ns: time in which it computes.
        sync_ns: time in which it waits for an all-reduce.
        idle_ns: all other time.
    """

    device: str
    busy_ns: NonNegative
    idle_ns: NonNegative
    sync_ns: NonNegative
    peak_bytes: NonNegative
    memory: Memory


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step as the simulator predicts it.

    Attributes:
        load_ns: for plans for throughput only: the largest load of a device, its work per step once the pipeline is
            full.
        bubble: the idle share of the devices that have a stage.
    """

    step_ns: NonNegative
    load_ns: NonNegative | msgspec.UnsetType = msgspec.UNSET
    samples_per_s: NonNegativeFloat
    bubble: NonNegativeFloat
    ranks: tuple[RankPrediction, ...]

    @property
    def objective_ns(self) -> int:
        """What the plan minimizes: the step time, or the largest load of a device."""
        return self.step_ns if self.load_ns is msgspec.UNSET else self.load_ns

    @property
    def peaks_bytes(self) -> dict[str, int]:
        """The peak memory of each device by name."""
        return {rank.device: rank.peak_bytes for rank in self.ranks}

    @property
    def peak_bytes(self) -> int:
        """The largest peak memory of a device; 0 if nothing was predicted."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)


NOT_PREDICTED = Prediction(step_ns=0, samples_per_s=0.0, bubble=0.0, ranks=())
"""In place of the prediction of a plan whose file holds none."""
