"""What a step waits for: the chain of actions, transfers and all-reduces that ends with it, each begun by the last."""

from collections import Counter

from bapipe.schedules.table import Phase
from bapipe.simulator.timeline import Span, Sync, Timeline, Transfer, Update

Event = Span | Transfer | Sync | Update


def critical_path(timeline: Timeline) -> tuple[Event, ...]:
    """Returns the events of a predicted step, first to last, that follow one another without a pause. O(n log n)."""
    events: list[Event] = [*timeline.spans, *timeline.transfers, *timeline.syncs, *timeline.updates]
    ending: dict[int, list[Event]] = {}
    for event in events:
        if event.end_ns > event.start_ns:
            ending.setdefault(event.end_ns, []).append(event)
    path: list[Event] = []
    at_ns = timeline.step_ns
    while at_ns > 0 and ending.get(at_ns):
        after = path[-1] if path else None
        path.append(min(ending[at_ns], key=lambda event: _distance(event, after)))
        at_ns = path[-1].start_ns
    return tuple(reversed(path))


def _distance(event: Event, after: Event | None) -> int:
    """How unlikely it is that `after` waited for an event that ends when it starts."""
    if after is None:
        return 0
    if isinstance(after, Span) and isinstance(event, Transfer) and event.target == after.rank:
        forward = after.action.phase is Phase.FORWARD
        stage = event.stage + (1 if forward else -1)
        if (event.phase is Phase.FORWARD) == forward and (stage, event.microbatch) == after.action[::2]:
            return 0
    if isinstance(after, Transfer) and isinstance(event, Span):
        same = (event.rank, event.action.stage, event.action.microbatch) == (
            after.source,
            after.stage,
            after.microbatch,
        )
        return 0 if same else 3
    if isinstance(after, Transfer) and isinstance(event, Transfer):
        return 1 if (event.source, event.target) == (after.source, after.target) else 4
    if isinstance(event, Sync) or isinstance(after, Sync):
        same_stage = _stage(event) == _stage(after)
        return 0 if same_stage else 4
    if isinstance(event, Span | Update) and isinstance(after, Span | Update):
        return 1 if event.rank == after.rank else 2
    return 3


def _stage(event: Event) -> int:
    return event.action.stage if isinstance(event, Span) else event.stage


def time_shares(timeline: Timeline) -> list[tuple[str, int]]:
    """Returns what the critical path is made of, in words and nanoseconds, the longest first."""
    spent: Counter[str] = Counter()
    for event in critical_path(timeline):
        spent[_name(event, timeline.devices)] += event.end_ns - event.start_ns
    return sorted(spent.items(), key=lambda item: (-item[1], item[0]))


def _name(event: Event, devices: tuple[str, ...]) -> str:
    if isinstance(event, Span):
        return f"stage {event.action.stage} computing"
    if isinstance(event, Transfer):
        return f"the link from {devices[event.source]} to {devices[event.target]}"
    if isinstance(event, Sync):
        return f"the all-reduce of stage {event.stage}"
    return f"the update of stage {event.stage}"
