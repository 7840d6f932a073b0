"""The sum of a stage's gradients over its replicas: buckets, when each is ready, and how long a ring takes."""

from collections.abc import Callable, Sequence

from bapipe.formats.cluster import Cluster
from bapipe.schedules.table import Phase
from bapipe.simulator.stage import Stage

LastBackward = tuple[int, Phase]
"""When a replica starts its last backward of a stage, and the phase of it: B, or W if backwards are split."""


def sum_ns(num_bytes: int, group_bytes: int, ranks: Sequence[int], cluster: Cluster) -> int:
    """Returns the time to sum gradients over `ranks`; see `sum_over`."""
    return sum_over(ranks, cluster)(num_bytes, group_bytes)


def sum_over(ranks: Sequence[int], cluster: Cluster) -> Callable[[int, int], int]:
    """Returns the time to sum gradients over `ranks`, by their bytes and how many of these the members sum as well.

    Without groups it is one ring. With groups, the gradients that the members sum go around a ring of all members of
    all ranks first; the others go around one ring for each member, of it and its partners, all at the same time.
    """
    num_members = cluster.devices[ranks[0]].num_members
    of_ranks = ring_over(ranks, cluster) if len(ranks) > 1 else None
    of_members = ring_over(ranks, cluster, num_members=num_members) if num_members > 1 else of_ranks

    def ns(num_bytes: int, group_bytes: int) -> int:
        total_ns = of_members(group_bytes) if of_members is not None and group_bytes else 0
        return (
            total_ns + of_ranks(num_bytes - group_bytes)
            if of_ranks is not None and num_bytes > group_bytes
            else total_ns
        )

    return ns


def ring_ns(num_bytes: int, ranks: Sequence[int], cluster: Cluster, *, num_members: int = 1) -> int:
    """Returns the time of a ring all-reduce; see `ring_over`."""
    return ring_over(ranks, cluster, num_members=num_members)(num_bytes)


def ring_over(ranks: Sequence[int], cluster: Cluster, *, num_members: int = 1) -> Callable[[int], int]:
    """Returns the time of a ring all-reduce, by its bytes, over the slowest link among `ranks`, `num_members` of each.

    Each of r devices sends 2 (r - 1) messages of a r-th of the bytes, rounded up (Patarasuk, Yuan 2009). If they sum
    with their own compute, a message takes no less than that.
    """
    num_devices, host_sum = len(ranks) * num_members, cluster.host_sum_link(ranks)
    links = cluster.links_among(ranks)
    if num_members > 1:
        links += [link for rank in ranks for link in cluster.member_links(rank)]
    if host_sum is not None:
        links.append(host_sum)

    def ns(num_bytes: int) -> int:
        message_bytes = -(-num_bytes // num_devices)
        return 2 * (num_devices - 1) * max(link.transfer_ns(message_bytes) for link in links)

    return ns


def reduce_buckets(
    stage: Stage, ranks: Sequence[int], last_backwards: Sequence[LastBackward | None], cluster: Cluster
) -> list[tuple[int, int]]:
    """Returns the start and the end of the all-reduce of each bucket of a stage.

    A bucket starts when it is ready on every replica and the bucket before it is done. `last_backwards` are those of
    the replicas, None for one without micro-batches.
    """
    if not stage.bucket_bytes:
        return []
    group_bytes = stage.group_bucket_bytes or (0,) * len(stage.bucket_bytes)
    durations_ns = map(sum_over(ranks, cluster), stage.bucket_bytes, group_bytes)
    all_reduces = []
    end_ns = 0
    for ready_ns, duration_ns in zip(_ready_ns(stage, ranks, last_backwards, cluster), durations_ns, strict=True):
        start_ns = max(end_ns, ready_ns)
        end_ns = start_ns + duration_ns
        all_reduces.append((start_ns, end_ns))
    return all_reduces


def _ready_ns(
    stage: Stage, ranks: Sequence[int], last_backwards: Sequence[LastBackward | None], cluster: Cluster
) -> list[int]:
    """Returns when every replica has the gradients of each bucket.

    That is during the last backward; if the ranks sum with their own compute, it is at the end of it.
    """
    overlaps = cluster.host_sum_link(ranks) is None
    ready_ns = [0] * len(stage.bucket_bytes)
    for cost, last in zip(stage.costs, last_backwards, strict=True):
        if last is None:
            continue
        start_ns, phase = last
        done_ns = (
            [done[phase is Phase.WEIGHT_GRAD] for done in cost.gradient_done_ns]
            if overlaps
            else [cost.ns(phase)] * len(ready_ns)
        )
        ready_ns = [max(ready, start_ns + done) for ready, done in zip(ready_ns, done_ns, strict=True)]
    return ready_ns
