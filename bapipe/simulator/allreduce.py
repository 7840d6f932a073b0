"""The sum of a stage's gradients over its replicas: buckets, when each is ready, and how long a ring takes."""

from collections.abc import Sequence

from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.schedules.table import Phase
from bapipe.simulator.stage import Stage

LastBackward = tuple[int, Phase]
"""When a replica starts its last backward of a stage, and the phase of it: B, or W if backwards are split."""


def sum_ns(num_bytes: int, group_bytes: int, ranks: Sequence[int], cluster: Cluster) -> int:
    """Returns the time to sum gradients over `ranks`, `group_bytes` of them over the members of the ranks as well.

    Without groups it is one ring. With groups, the gradients that the members sum go around a ring of all members of
    all ranks first; the others go around one ring for each member, of it and its partners, all at the same time.
    """
    total_ns = 0
    if group_bytes:
        total_ns += ring_ns(group_bytes, ranks, cluster, num_members=cluster.devices[ranks[0]].num_members)
    if num_bytes > group_bytes and len(ranks) > 1:
        total_ns += ring_ns(num_bytes - group_bytes, ranks, cluster)
    return total_ns


def ring_ns(num_bytes: int, ranks: Sequence[int], cluster: Cluster, *, num_members: int = 1) -> int:
    """Returns the time of a ring all-reduce over the slowest link among `ranks`, and among `num_members` of each.

    Each of r devices sends 2 (r - 1) messages of a r-th of the bytes, rounded up (Patarasuk, Yuan 2009). If they sum
    with their own compute, a message takes no less than that.
    """
    num_devices = len(ranks) * num_members
    message_bytes, host_sum = -(-num_bytes // num_devices), cluster.host_sum_link(ranks)
    links = _links_among(ranks, cluster)
    if num_members > 1:
        links += [link for rank in ranks for link in cluster.member_links(rank)]
    slowest_ns = max(link.transfer_ns(message_bytes) for link in links)
    if host_sum is not None:
        slowest_ns = max(slowest_ns, host_sum.transfer_ns(message_bytes))
    return 2 * (num_devices - 1) * slowest_ns


def _links_among(ranks: Sequence[int], cluster: Cluster) -> list[Bandwidth]:
    """Returns the distinct links between any two of some ranks. O(ranks) if no two devices have a link of their own."""
    if cluster.links:
        return [*{cluster.link(a, b) for a in ranks for b in ranks if a != b}]
    hosts = {cluster.devices[rank].host for rank in ranks}
    within = [cluster.intra_host] if len(hosts) < len(ranks) else []
    return within + ([cluster.inter_host] if len(hosts) > 1 else [])


def reduce_buckets(
    stage: Stage, ranks: Sequence[int], last_backwards: Sequence[LastBackward | None], cluster: Cluster
) -> list[tuple[int, int]]:
    """Returns the start and the end of the all-reduce of each bucket of a stage.

    A bucket starts when it is ready on every replica and the bucket before it is done. `last_backwards` are those of
    the replicas, None for one without micro-batches.
    """
    all_reduces = []
    end_ns = 0
    for bucket, num_bytes in enumerate(stage.bucket_bytes):
        start_ns = max(end_ns, _ready_ns(stage, bucket, ranks, last_backwards, cluster))
        group_bytes = stage.group_bucket_bytes[bucket] if stage.group_bucket_bytes else 0
        end_ns = start_ns + sum_ns(num_bytes, group_bytes, ranks, cluster)
        all_reduces.append((start_ns, end_ns))
    return all_reduces


def _ready_ns(
    stage: Stage, bucket: int, ranks: Sequence[int], last_backwards: Sequence[LastBackward | None], cluster: Cluster
) -> int:
    """Returns when every replica has the gradients of a bucket.

    That is during the last backward; if the ranks sum with their own compute, it is at the end of it.
    """
    overlaps = cluster.host_sum_link(ranks) is None
    ready_ns = 0
    for cost, last in zip(stage.costs, last_backwards, strict=True):
        if last is not None:
            start_ns, phase = last
            after_b_ns, after_w_ns = cost.gradient_done_ns[bucket] if overlaps else (cost.ns(phase),) * 2
            ready_ns = max(ready_ns, start_ns + (after_w_ns if phase is Phase.WEIGHT_GRAD else after_b_ns))
    return ready_ns
