"""The critical path of a simulated step: the chain of events without a pause that ends when the step ends.

Each event of the path begins when the one before it ends, so no event can begin earlier unless the one before it gets
shorter. The path is traced back from the end of the step: several events may end at the instant at which one begins,
and the most likely cause is chosen (`_unlikeliness`). An all-reduce may begin within its stage's last backward, when
that has filled a bucket of gradients; of that backward only the part before it is on the path.
"""

from collections import Counter
from collections.abc import Sequence

from bapipe.schedules.table import Phase
from bapipe.simulator.timeline import Span, Sync, Timeline, Transfer, Update

Event = Span | Transfer | Sync | Update


def critical_path(timeline: Timeline) -> tuple[Event, ...]:
    """Returns the events of a simulated step on its critical path, first to last. O(n) for n events, without ties."""
    events: list[Event] = [*timeline.spans, *timeline.transfers, *timeline.syncs, *timeline.updates]
    last_backwards = _last_backwards(timeline) if timeline.syncs else []
    ending: dict[int, list[Event]] = {}
    for event in events:
        # Events of zero length would stop the trace from moving back in time.
        if event.end_ns > event.start_ns:
            ending.setdefault(event.end_ns, []).append(event)
    # From the end of the step backwards, until the start or a pause.
    path: list[Event] = []
    at_ns = timeline.step_ns
    while at_ns > 0:
        after = path[-1] if path else None
        causes = ending.get(at_ns, [])
        if isinstance(after, Sync):
            causes = causes + _parts_before(after, last_backwards)
        if not causes:
            break
        path.append(min(causes, key=lambda event: _unlikeliness(event, after)))
        at_ns = path[-1].start_ns
    return tuple(reversed(path))


def _last_backwards(timeline: Timeline) -> list[Span]:
    """Returns the last backward of each stage on each of its ranks, those that begin last first."""
    last: dict[tuple[int, int], Span] = {}
    for span in timeline.spans:
        if span.action.phase is not Phase.FORWARD:
            last[span.rank, span.action.stage] = span
    return sorted(last.values(), key=lambda span: -span.start_ns)


def _parts_before(sync: Sync, last_backwards: Sequence[Span]) -> list[Event]:
    """Returns the parts before an all-reduce of its stage's backwards that run when it begins."""
    return [
        span._replace(end_ns=sync.start_ns)
        for span in last_backwards
        if span.action.stage == sync.stage and span.start_ns < sync.start_ns < span.end_ns
    ]


def _unlikeliness(event: Event, after: Event | None) -> int:
    """Returns how unlikely it is that `after` waited for an event that ends when it starts; 0 is a true dependency."""
    if after is None:
        return 0
    # An action waits for the transfer of its own input.
    if isinstance(after, Span) and isinstance(event, Transfer) and event.target == after.rank:
        forward = after.action.phase is Phase.FORWARD
        stage = event.stage + (1 if forward else -1)
        if (event.phase is Phase.FORWARD) == forward and (stage, event.microbatch) == after.action[::2]:
            return 0
    # A transfer waits for the action that produces it.
    if isinstance(after, Transfer) and isinstance(event, Span):
        same = (event.rank, event.action.stage, event.action.microbatch) == (
            after.source,
            after.stage,
            after.microbatch,
        )
        return 0 if same else 3
    # Or for the transfer before it on its link.
    if isinstance(after, Transfer) and isinstance(event, Transfer):
        return 1 if (event.source, event.target) == (after.source, after.target) else 4
    # An all-reduce waits for its stage's backward, and the update for its all-reduce.
    if isinstance(event, Sync) or isinstance(after, Sync):
        same_stage = _stage(event) == _stage(after)
        return 0 if same_stage else 4
    # An action or update waits for the one before it on its device.
    if isinstance(event, Span | Update) and isinstance(after, Span | Update):
        return 1 if event.rank == after.rank else 2
    return 3


def _stage(event: Event) -> int:
    return event.action.stage if isinstance(event, Span) else event.stage


def time_shares(timeline: Timeline, path: Sequence[Event] | None = None) -> list[tuple[str, int]]:
    """Returns what the critical path, if it is not given, consists of: words and nanoseconds, the longest first."""
    spent: Counter[str] = Counter()
    for event in critical_path(timeline) if path is None else path:
        spent[_name(event, timeline.devices)] += event.end_ns - event.start_ns
    return sorted(spent.items(), key=lambda item: (-item[1], item[0]))


def _name(event: Event, devices: tuple[str, ...]) -> str:
    if isinstance(event, Span):
        return f"compute of stage {event.action.stage}"
    if isinstance(event, Transfer):
        return f"the link from {devices[event.source]} to {devices[event.target]}"
    if isinstance(event, Sync):
        return f"the all-reduce of stage {event.stage}"
    return f"the update of stage {event.stage}"
