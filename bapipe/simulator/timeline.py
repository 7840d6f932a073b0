"""What happens in one step: actions, transfers, all-reduces and updates over time, predicted or measured."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from operator import itemgetter, le
from typing import Any, NamedTuple

import msgspec

from bapipe.formats.prediction import Memory, Prediction, RankPrediction
from bapipe.printable import counted
from bapipe.schedules.table import Action, Phase
from bapipe.tables import data_frame, rows_html
from bapipe.units import number


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


class SpanColumns(NamedTuple):
    """The spans of a rank by time, as columns."""

    actions: tuple[Action, ...] = ()
    starts_ns: Sequence[int] = ()
    ends_ns: Sequence[int] = ()

    @property
    def is_one_at_a_time(self) -> bool:
        """Whether each action ends before the next one begins."""
        return all(map(le, self.ends_ns, islice(self.starts_ns, 1, None)))

    @property
    def num_lanes(self) -> int:
        """Two if forwards and backwards run side by side."""
        if self.is_one_at_a_time:
            return min(len(self.actions), 1)
        return len({action.phase is Phase.FORWARD for action in self.actions})

    @property
    def running_ns(self) -> int:
        """The time in which any action runs; a device that runs side by side may run two at once."""
        if self.is_one_at_a_time:
            return sum(self.ends_ns) - sum(self.starts_ns)
        running_ns = until_ns = 0
        for start_ns, end_ns in zip(self.starts_ns, self.ends_ns, strict=True):
            running_ns += max(0, end_ns - max(start_ns, until_ns))
            until_ns = max(until_ns, end_ns)
        return running_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """One step as columns: its figures and its picture need no object for each of its actions, which may be a million.

    Attributes:
        spans: of each rank.
        transfers: each field of `Transfer` for all transfers.
        usage: of each rank, the bytes of stashes and those of workspaces during each of its spans; empty if not known.
    """

    devices: tuple[str, ...]
    spans: tuple[SpanColumns, ...]
    transfers: tuple[Sequence[Any], ...]
    syncs: tuple[Sync, ...]
    updates: tuple[Update, ...]
    memory: tuple[Memory, ...]
    usage: tuple[tuple[Sequence[int], Sequence[int]], ...]

    @property
    def step_ns(self) -> int:
        """When the last device is done."""
        ends = [max(spans.ends_ns, default=0) for spans in self.spans]
        return max(ends + [u.end_ns for u in self.updates] + [s.end_ns for s in self.syncs], default=0)

    def prediction(self, minibatch_size: int) -> Prediction:
        """Returns the step's figures as a plan stores them."""
        step_ns = self.step_ns
        updates: list[list[Update]] = [[] for _ in self.devices]
        for update in self.updates:
            updates[update.rank].append(update)
        ranks = tuple(self._rank(rank, step_ns, own) for rank, own in enumerate(updates))
        working = [rank for rank, spans in enumerate(self.spans) if spans.actions]
        idle_ns = sum(ranks[rank].idle_ns for rank in working)
        return Prediction(
            step_ns=step_ns,
            samples_per_s=minibatch_size * 1e9 / step_ns if step_ns else 0.0,
            bubble=idle_ns / (len(working) * step_ns) if step_ns else 0.0,
            ranks=ranks,
        )

    def _rank(self, rank: int, step_ns: int, updates: Sequence[Update]) -> RankPrediction:
        spans = self.spans[rank]
        busy_ns = spans.running_ns + sum(u.end_ns - u.start_ns for u in updates)
        sync_ns = _waiting_ns(max(spans.ends_ns, default=0), updates)
        return RankPrediction(
            device=self.devices[rank],
            busy_ns=busy_ns,
            idle_ns=step_ns - busy_ns - sync_ns,
            sync_ns=sync_ns,
            peak_bytes=self.memory[rank].total,
            memory=self.memory[rank],
        )

    def timeline(self) -> "Timeline":
        """Returns the step as a record of each action and transfer."""
        # partial(tuple.__new__, Span) makes a Span of a row faster than Span(*row) does.
        spans = (map(partial(tuple.__new__, Span), zip(repeat(r), *of)) for r, of in enumerate(self.spans))
        return Timeline(
            devices=self.devices,
            spans=tuple(span for of_rank in spans for span in of_rank),
            transfers=tuple(map(partial(tuple.__new__, Transfer), zip(*self.transfers, strict=True))),
            syncs=self.syncs,
            updates=self.updates,
            memory=self.memory,
            usage=tuple(tuple(zip(*of_rank, strict=True)) for of_rank in self.usage),
        )


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
        devices, actions = counted(len(self.devices), "device"), counted(len(self.spans), "action")
        return f"Timeline({devices}, {actions}, {number(self.step_ns / 1e6)} ms)"

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
        ends = [max(map(itemgetter(3), self.spans), default=0)]
        return max(ends + [u.end_ns for u in self.updates] + [s.end_ns for s in self.syncs])

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
        begin = bisect_left(self.spans, rank, key=itemgetter(0))
        return self.spans[begin : bisect_right(self.spans, rank, lo=begin, key=itemgetter(0))]

    def lanes(self, rank: int) -> tuple[tuple[Span, ...], ...]:
        """Returns the spans of a rank in one lane, or its forwards and its backwards if they run side by side."""
        spans = self.spans_of(rank)
        if _columns(spans).is_one_at_a_time:
            return (spans,)
        forwards = tuple(span for span in spans if span.action.phase is Phase.FORWARD)
        return forwards, tuple(span for span in spans if span.action.phase is not Phase.FORWARD)

    def columns(self) -> StepColumns:
        """Returns the step as columns."""
        return StepColumns(
            devices=self.devices,
            spans=tuple(_columns(self.spans_of(rank)) for rank in range(len(self.devices))),
            transfers=tuple(zip(*self.transfers, strict=True)) or ((),) * len(Transfer._fields),
            syncs=self.syncs,
            updates=self.updates,
            memory=self.memory,
            usage=tuple((tuple(map(itemgetter(0), used)), tuple(map(itemgetter(1), used))) for used in self.usage),
        )

    def prediction(self, minibatch_size: int) -> Prediction:
        """Returns the step's figures as a plan stores them."""
        return self.columns().prediction(minibatch_size)


def _columns(spans: Sequence[Span]) -> SpanColumns:
    return SpanColumns(*list(zip(*spans, strict=True))[1:])


def _waiting_ns(compute_end_ns: int, updates: Sequence[Update]) -> int:
    """Returns how long a rank that has run its actions waits for all-reduces before its updates."""
    waiting_ns, now = 0, compute_end_ns
    for update in sorted(updates, key=lambda u: u.start_ns):
        waiting_ns += update.start_ns - now
        now = update.end_ns
    return waiting_ns
