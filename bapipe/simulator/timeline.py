"""What happens in one step: actions, transfers, all-reduces and updates over time, predicted or measured."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from bapipe.formats.plan import Memory, Prediction, RankPrediction
from bapipe.schedules.table import Action, Phase
from bapipe.tables import data_frame, rows_html


class Span(NamedTuple):
    """An action on a rank."""

    rank: int
    action: Action
    start_ns: int
    end_ns: int


class Transfer(NamedTuple):
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
        memory: of each rank, at its peak.
        usage: of each rank, the bytes of stashes and of workspaces during each of its spans; empty if not known.
    """

    devices: tuple[str, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...] = ()
    syncs: tuple[Sync, ...] = ()
    updates: tuple[Update, ...] = ()
    memory: tuple[Memory, ...]
    usage: tuple[tuple[tuple[int, int], ...], ...] = ()

    def __repr__(self) -> str:
        """Returns the size of the step in one line: all actions would fill a notebook."""
        return f"Timeline({len(self.devices)} devices, {len(self.spans)} actions, {self.step_ns / 1e6:,.4g} ms)"

    def rows(self) -> list[dict[str, object]]:
        """Returns a row for each action, transfer, all-reduce and update, by start, as `to_pandas` has them."""
        name = self.devices.__getitem__
        found: list[dict[str, object]] = [
            {"what": str(s.action), "device": name(s.rank), "start_ns": s.start_ns, "end_ns": s.end_ns}
            for s in self.spans
        ]
        for t in self.transfers:
            device = f"{name(t.source)} to {name(t.target)}"
            what = f"send {t.stage}{t.phase.value}{t.microbatch}"
            found.append({"what": what, "device": device, "start_ns": t.start_ns, "end_ns": t.end_ns})
        for sync in self.syncs:
            what = f"all-reduce of stage {sync.stage}, bucket {sync.bucket}"
            found.append({"what": what, "device": "", "start_ns": sync.start_ns, "end_ns": sync.end_ns})
        for u in self.updates:
            what = f"update of stage {u.stage}"
            found.append({"what": what, "device": name(u.rank), "start_ns": u.start_ns, "end_ns": u.end_ns})
        return sorted(found, key=lambda row: (row["start_ns"], row["end_ns"], row["what"], row["device"]))

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with a row for each action, transfer, all-reduce and update."""
        return data_frame(self.rows())

    def _repr_html_(self) -> str:
        """Returns the first events of the step, for a notebook."""
        return rows_html([repr(self)], self.rows())

    @property
    def step_ns(self) -> int:
        """When the last device is done."""
        ends = [[s.end_ns for s in self.spans], [u.end_ns for u in self.updates], [s.end_ns for s in self.syncs]]
        return max((end for group in ends for end in group), default=0)

    @property
    def memory_over_time(self) -> tuple[tuple[Memory, ...], ...]:
        """The memory of each rank during each of its spans; empty if not known."""
        return tuple(
            tuple(msgspec.structs.replace(peak, stash=stash, workspace=workspace) for stash, workspace in usage)
            for peak, usage in zip(self.memory, self.usage, strict=False)
        )

    def peak_action(self, rank: int) -> Action | None:
        """Returns the first action during which the memory of a rank is at its peak; None if not known."""
        if not self.usage or not self.usage[rank]:
            return None
        actions = [span.action for span in self.spans_of(rank)]
        totals = list(map(sum, self.usage[rank]))
        return actions[totals.index(max(totals))]

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        """Returns the spans of a rank, by time."""
        begin = bisect_left(self.spans, rank, key=lambda span: span.rank)
        return self.spans[begin : bisect_right(self.spans, rank, lo=begin, key=lambda span: span.rank)]

    def lanes(self, rank: int) -> tuple[tuple[Span, ...], ...]:
        """Returns the spans of a rank in one lane, or its forwards and its backwards if they run side by side."""
        spans = self.spans_of(rank)
        if all(a.end_ns <= b.start_ns for a, b in pairwise(spans)):
            return (spans,)
        forwards = tuple(span for span in spans if span.action.phase is Phase.FORWARD)
        return forwards, tuple(span for span in spans if span.action.phase is not Phase.FORWARD)

    def prediction(self, minibatch_size: int) -> Prediction:
        """Returns the step's figures as a plan stores them."""
        step_ns = self.step_ns
        ranks = tuple(self._rank(rank, step_ns) for rank in range(len(self.devices)))
        working = {span.rank for span in self.spans}
        idle_ns = sum(ranks[rank].idle_ns for rank in working)
        return Prediction(
            step_ns=step_ns,
            samples_per_s=minibatch_size * 1e9 / step_ns if step_ns else 0.0,
            bubble=idle_ns / (len(working) * step_ns) if step_ns else 0.0,
            ranks=ranks,
        )

    def _rank(self, rank: int, step_ns: int) -> RankPrediction:
        spans = self.spans_of(rank)
        updates = [u for u in self.updates if u.rank == rank]
        busy_ns = _running_ns(spans) + sum(u.end_ns - u.start_ns for u in updates)
        sync_ns = _waiting_ns(max((s.end_ns for s in spans), default=0), updates)
        return RankPrediction(
            device=self.devices[rank],
            busy_ns=busy_ns,
            idle_ns=step_ns - busy_ns - sync_ns,
            sync_ns=sync_ns,
            peak_bytes=self.memory[rank].total,
            memory=self.memory[rank],
        )


def _running_ns(spans: Sequence[Span]) -> int:
    """Returns the time in which any action runs; a device that runs side by side may run two at once."""
    running_ns = until_ns = 0
    for span in spans:
        running_ns += max(0, span.end_ns - max(span.start_ns, until_ns))
        until_ns = max(until_ns, span.end_ns)
    return running_ns


def _waiting_ns(compute_end_ns: int, updates: Sequence[Update]) -> int:
    """Returns how long a rank that has run its actions waits for all-reduces before its updates."""
    waiting_ns, now = 0, compute_end_ns
    for update in sorted(updates, key=lambda u: u.start_ns):
        waiting_ns += update.start_ns - now
        now = update.end_ns
    return waiting_ns
