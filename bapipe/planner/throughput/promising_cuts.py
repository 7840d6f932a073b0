"""Downsets at which a plan within a limit may be cut, if they are too many: those with few bytes."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from bapipe.graph.downsets import members
from bapipe.graph.layer_graph import Graph
from bapipe.planner.throughput.cut_windows import Tensor
from bapipe.planner.throughput.neighbourhood import adjacent_downsets

NUM_STARTS = 16
"""Downsets that a search begins with, of those whose work is nearest to the range."""

MAX_LOOKED_AT = 4
"""Downsets that are looked at for each that may be returned."""


def promising_downsets(
    graph: Graph,
    starts: Iterable[int],
    node_ns: Sequence[int],
    tensors: Sequence[Tensor],
    ranges: Sequence[tuple[float, float]],
    max_downsets: int,
) -> list[int]:
    """Returns the empty downset, all nodes, and about `max_downsets` downsets with work in some range.

    Args:
        starts: some downsets.
        node_ns: the work of each node.
        ranges: of the work before a cut; each gets an equal share of the downsets.
    """
    work_of = {start: sum(node_ns[node] for node in members(start)) for start in starts}
    found = {0: None, (1 << graph.num_nodes) - 1: None}
    for least, most in ranges:

        def outside_ns(work_ns: int, least: float = least, most: float = most) -> float:
            return max(least - work_ns, work_ns - most, 0.0)

        nearest = sorted(work_of, key=lambda start: (outside_ns(work_of[start]), start))[:NUM_STARTS]
        seen = set(nearest)
        queue = [
            (outside_ns(work_of[start]), crossing_bytes(start, tensors), start, work_of[start]) for start in nearest
        ]
        queue.sort()
        # Best first: nearest to the range, then the fewest bytes.
        left = quota = max_downsets // len(ranges)
        for _ in range(MAX_LOOKED_AT * quota):
            if not queue or not left:
                break
            too_far_ns, _, nodes, work_ns = heappop(queue)
            if not too_far_ns:
                found[nodes] = None
                left -= 1
            for neighbour in adjacent_downsets(graph, nodes):
                if neighbour not in seen:
                    seen.add(neighbour)
                    moved = node_ns[(nodes ^ neighbour).bit_length() - 1]
                    work = work_ns + (moved if neighbour > nodes else -moved)
                    heappush(queue, (outside_ns(work), crossing_bytes(neighbour, tensors), neighbour, work))
    return sorted(found, key=lambda nodes: (nodes.bit_count(), nodes))


def crossing_bytes(nodes: int, tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors that cross the cut behind a downset."""
    return sum(num_bytes for num_bytes, maker, users, _ in tensors if nodes >> maker & 1 and users & ~nodes)
