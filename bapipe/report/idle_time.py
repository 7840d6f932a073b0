"""Why devices are idle in a step: before the first action, waiting for a transfer or a stage, and at the end."""

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from bapipe.simulator.timeline import Span, Timeline, Transfer

CAUSES = ("before its first action", "transfer", "another stage", "after its last action", "no stage")
"""Names of the causes; see `idle_ns_by_cause`."""


def idle_ns_by_cause(timeline: Timeline) -> tuple[dict[str, int], ...]:
    """Returns for each rank how long it is idle for each of `CAUSES`; together its `idle_ns`.

    Waiting for an all-reduce before an update is no idle time, but its `sync_ns`.

    In a pause between two actions, the device waits for a transfer as long as one to it is under way that ends in the
    pause or at its end; the rest of the pause it waits for another stage. O(n log n).
    """
    step_ns = timeline.step_ns
    by_start, by_end = attrgetter("start_ns"), attrgetter("end_ns")
    arriving: list[list[Transfer]] = [[] for _ in timeline.devices]
    for transfer in timeline.transfers:
        arriving[transfer.target].append(transfer)
    return tuple(
        _of_rank(sorted(timeline.spans_of(rank), key=by_start), sorted(to_it, key=by_end), timeline, rank, step_ns)
        for rank, to_it in enumerate(arriving)
    )


def _of_rank(
    spans: Sequence[Span], arriving: Sequence[Transfer], timeline: Timeline, rank: int, step_ns: int
) -> dict[str, int]:
    idle = dict.fromkeys(CAUSES, 0)
    if not spans:
        return idle | {"no stage": step_ns}
    idle["before its first action"] = spans[0].start_ns
    ends_ns = [transfer.end_ns for transfer in arriving]
    until_ns = spans[0].end_ns
    for span in spans[1:]:
        if span.start_ns > until_ns:
            transferring = _transferring_ns(arriving, ends_ns, until_ns, span.start_ns)
            idle["transfer"] += transferring
            idle["another stage"] += span.start_ns - until_ns - transferring
        until_ns = max(until_ns, span.end_ns)
    updated_ns = max((update.end_ns for update in timeline.updates if update.rank == rank), default=0)
    idle["after its last action"] = step_ns - max(until_ns, updated_ns)
    return idle


def _transferring_ns(arriving: Sequence[Transfer], ends_ns: Sequence[int], begin_ns: int, end_ns: int) -> int:
    """Returns how long in a pause transfers are under way that arrive in it."""
    total, covered_ns = 0, begin_ns
    for transfer in arriving[bisect_left(ends_ns, begin_ns + 1) :]:
        if transfer.end_ns > end_ns:
            break
        total += max(0, transfer.end_ns - max(transfer.start_ns, covered_ns))
        covered_ns = max(covered_ns, transfer.end_ns)
    return total
