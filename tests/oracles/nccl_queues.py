"""How long a step takes by NCCL's rules, from the calls that each rank has made. Written from torch's ProcessGroupNCCL.

A rank's process makes its calls without waiting. What it computes runs on one stream, in order. A send or receive goes
into the queue of its group and peer: it runs after what is in that queue, and after all that the compute stream held
when it was called. A transfer runs when both ends are at the heads of their queues. Waiting for a transfer makes the
compute stream wait, not the process.

Where the default group was made with a `device_id`, a group has one queue for all peers.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Compute:
    """Work of a length on the compute stream."""

    ns: int


@dataclass(frozen=True)
class Post:
    """A send to, or a receive from, a peer in a group; `number` is its own on the rank."""

    number: int
    group: Hashable
    peer: int
    is_send: bool
    ns: int


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for a transfer."""

    number: int


Call = Compute | Post | Wait


@dataclass
class _Queue:
    """Transfers of a rank in a group, with a peer or with all: (post, how many calls the compute stream held)."""

    posts: list[tuple[Post, int]] = field(default_factory=list)
    head: int = 0
    free_ns: int = 0


def step_ns(calls: Sequence[Sequence[Call]], *, one_queue: bool = False) -> int | None:
    """When the last rank has computed everything; None if they wait for each other for ever.

    `one_queue`: a group has one for all peers.
    """
    streams: list[list[Call]] = [[call for call in own if not isinstance(call, Post)] for own in calls]
    queues: dict[tuple[int, Hashable, int | None], _Queue] = {}
    for rank, own in enumerate(calls):
        num_before = 0
        for call in own:
            if isinstance(call, Post):
                key = rank, call.group, None if one_queue else call.peer
                queues.setdefault(key, _Queue()).posts.append((call, num_before))
            else:
                num_before += 1
    ends_ns: list[list[int]] = [[] for _ in calls]  # of what each stream has done
    done: dict[tuple[int, int], int] = {}  # (rank, number of the post) -> when
    while _computed(streams, ends_ns, done) or _transferred(queues, ends_ns, done):
        pass
    if any(len(ends) < len(stream) for ends, stream in zip(ends_ns, streams, strict=True)):
        return None
    return max(ends[-1] for ends in ends_ns if ends)


def _computed(
    streams: Sequence[Sequence[Call]], ends_ns: Sequence[list[int]], done: Mapping[tuple[int, int], int]
) -> bool:
    """Lets every stream go as far as it can; whether one has moved."""
    moved = False
    for rank, stream in enumerate(streams):
        while len(ends_ns[rank]) < len(stream):
            call, now = stream[len(ends_ns[rank])], ends_ns[rank][-1] if ends_ns[rank] else 0
            if isinstance(call, Compute):
                now += call.ns
            elif isinstance(call, Wait):
                if (rank, call.number) not in done:
                    break
                now = max(now, done[rank, call.number])
            ends_ns[rank].append(now)
            moved = True
    return moved


def _transferred(
    queues: Mapping[tuple[int, Hashable, int | None], _Queue],
    ends_ns: Sequence[Sequence[int]],
    done: dict[tuple[int, int], int],
) -> bool:
    """Runs the transfers whose two ends are at the heads of their queues; whether there was one."""
    moved = False
    for (rank, group, one_peer), queue in queues.items():
        while queue.head < len(queue.posts):
            post, before = queue.posts[queue.head]
            other = queues.get((post.peer, group, None if one_peer is None else rank))
            if other is None or other.head == len(other.posts):
                break
            other_post, other_before = other.posts[other.head]
            if other_post.peer != rank:
                break
            if post.is_send == other_post.is_send:
                return False  # NCCL would hang
            if before > len(ends_ns[rank]) or other_before > len(ends_ns[post.peer]):
                break
            given = (ends_ns[rank], before), (ends_ns[post.peer], other_before)
            ready = [queue.free_ns, other.free_ns, *(ends[num - 1] for ends, num in given if num)]
            end_ns = max(ready) + post.ns
            done[rank, post.number] = done[post.peer, other_post.number] = end_ns
            queue.free_ns = other.free_ns = end_ns
            queue.head, other.head, moved = queue.head + 1, other.head + 1, True
    return moved


def gets_through_if_hosts_wait(calls: Sequence[Sequence[Call]]) -> bool:
    """Whether all ranks end where a host waits, before it computes or waits, for all that its GPU was given.

    It does so for what CUDA calls context synchronization: a kernel that is loaded, memory that is freed.
    """
    reached, posts = [0] * len(calls), [[call for call in own if isinstance(call, Post)] for own in calls]
    num_posted = [0] * len(calls)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(calls):
            while reached[rank] < len(own):
                call = own[reached[rank]]
                if not isinstance(call, Post) and not _all_matched(rank, posts, num_posted):
                    break
                num_posted[rank] += isinstance(call, Post)
                reached[rank], moved = reached[rank] + 1, True
    return all(place == len(own) for place, own in zip(reached, calls, strict=True))


def _all_matched(rank: int, posts: Sequence[Sequence[Post]], num_posted: Sequence[int]) -> bool:
    """Whether the peers have posted the other ends of all that a rank has posted."""

    def counted(at: int) -> Counter[tuple[Hashable, int, bool]]:
        return Counter((post.group, post.peer, post.is_send) for post in posts[at][: num_posted[at]])

    others = [counted(at) for at in range(len(posts))]
    return all(
        others[peer][group, rank, not is_send] >= number for (group, peer, is_send), number in others[rank].items()
    )
