"""What happens in one step: actions, transfers, all-reduces and updates over time, predicted or measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.plan import Memory, Prediction, RankPrediction
from bapipe.schedule import Action, Phase


@dataclass(frozen=True, slots=True)
class Span:
    """An action on a rank."""

    rank: int
    action: Action
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Activations (F) or gradients (B) of a micro-batch that `stage` sends from one rank to another."""

    source: int
    target: int
    stage: int
    phase: Phase
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Sync:
    """The all-reduce of one bucket of a stage's gradients."""

    stage: int
    bucket: int
    num_bytes: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's update of a stage on a rank."""

    rank: int
    stage: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step; times count from its start.

    Attributes:
        devices: the name of each rank's device.
        spans: ordered by rank, then by time.
        memory: what each rank holds at its peak.
        memory_over_time: what each rank holds during each of its spans; empty where it is not known.
    """

    devices: tuple[str, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...] = ()
    syncs: tuple[Sync, ...] = ()
    updates: tuple[Update, ...] = ()
    memory: tuple[Memory, ...]
    memory_over_time: tuple[tuple[Memory, ...], ...] = ()

    @property
    def step_ns(self) -> int:
        """When the last device is done."""
        ends = [[s.end_ns for s in self.spans], [u.end_ns for u in self.updates], [s.end_ns for s in self.syncs]]
        return max((end for group in ends for end in group), default=0)

    def peak_action(self, rank: int) -> Action | None:
        """Returns the action during which a rank holds most, the first such one; None where that is not known."""
        if not self.memory_over_time or not self.memory_over_time[rank]:
            return None
        own = [span.action for span in self.spans if span.rank == rank]
        held = [memory.total for memory in self.memory_over_time[rank]]
        return own[held.index(max(held))]

    def prediction(self, minibatch_size: int) -> Prediction:
        """Returns the step's figures as a plan holds them."""
        step_ns = self.step_ns
        ranks = tuple(self._rank(rank, step_ns) for rank in range(len(self.devices)))
        working = {span.rank for span in self.spans}
        idle = sum(ranks[rank].idle_ns for rank in working)
        return Prediction(
            step_ns=step_ns,
            samples_per_s=minibatch_size * 1e9 / step_ns if step_ns else 0.0,
            bubble=idle / (len(working) * step_ns) if step_ns else 0.0,
            ranks=ranks,
        )

    def _rank(self, rank: int, step_ns: int) -> RankPrediction:
        spans = [s for s in self.spans if s.rank == rank]
        updates = [u for u in self.updates if u.rank == rank]
        busy = sum(s.end_ns - s.start_ns for s in spans) + sum(u.end_ns - u.start_ns for u in updates)
        sync = _waiting(max((s.end_ns for s in spans), default=0), updates)
        return RankPrediction(
            device=self.devices[rank],
            busy_ns=busy,
            idle_ns=step_ns - busy - sync,
            sync_ns=sync,
            peak_bytes=self.memory[rank].total,
            memory=self.memory[rank],
        )


def _waiting(compute_end_ns: int, updates: Sequence[Update]) -> int:
    """Returns how long a rank that has run its actions waits for all-reduces before its updates."""
    waiting, now = 0, compute_end_ns
    for update in sorted(updates, key=lambda u: u.start_ns):
        waiting += update.start_ns - now
        now = update.end_ns
    return waiting
