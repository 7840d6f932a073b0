"""Which downsets of a graph are one node larger than which others: the cover relation of their lattice.

What holds for all subsets of a downset among the downsets then needs no pairs of downsets: the largest value over all
of them is the largest of its own value and of those of the downsets that it covers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from bapipe.graph.layer_graph import Graph
from bapipe.planner.compute.arrays import Bools, Ints

if TYPE_CHECKING:
    from numpy.typing import NDArray

    BitArray = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """From the downsets of one size to those of the next, one node larger or one node smaller.

    Attributes:
        first, stop: of the downsets of the next size.
        first_before: of the downsets of the size before.
        near: the neighbours of the size before, of one downset of the next size after another; [covers].
        offsets: where those of each downset begin; [downsets of the next size].
    """

    first: int
    stop: int
    first_before: int
    near: Ints
    offsets: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Covers:
    """The cover relation of all downsets of a graph, smaller ones first.

    Attributes:
        growing: steps from the empty downset to all nodes.
        shrinking: steps from all nodes to the empty downset.
        packed: the nodes of each downset, as bits; [downsets, bytes].
    """

    growing: tuple[Step, ...]
    shrinking: tuple[Step, ...]
    packed: "BitArray"


def packed_bits(node_sets: Sequence[int], num_nodes: int) -> "BitArray":
    """Returns the nodes of each set as bits, the lowest first. [sets, bytes]"""
    width = (num_nodes + 7) // 8
    joined = b"".join(nodes.to_bytes(width, "little") for nodes in node_sets)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(node_sets), width)


def covers_of(graph: Graph, listed: Sequence[int]) -> Covers:
    """Returns the cover relation of all downsets of a graph, listed smaller ones first. O(nodes * downsets)"""
    packed = packed_bits(listed, graph.num_nodes)
    number = {nodes: i for i, nodes in enumerate(listed)}

    def inside(node: int) -> Bools:
        found: Bools = packed[:, node // 8] >> node % 8 & 1 == 1
        return found

    larger: list[int] = []
    smaller: list[int] = []
    for node in range(graph.num_nodes):
        # A node can be left out if nothing that follows it is inside.
        removable = inside(node)
        for target in graph.after[node]:
            removable &= ~inside(target)
        having = np.flatnonzero(removable).tolist()
        larger += having
        smaller += [number[listed[i] ^ 1 << node] for i in having]
    sizes = [nodes.bit_count() for nodes in listed]
    starts = np.searchsorted(sizes, np.arange(graph.num_nodes + 2)).tolist()
    levels = list(pairwise(starts))
    return Covers(
        growing=_steps(levels, np.array(larger, dtype=np.int64), np.array(smaller, dtype=np.int64)),
        shrinking=_steps(levels[::-1], np.array(smaller, dtype=np.int64), np.array(larger, dtype=np.int64)),
        packed=packed,
    )


def _steps(levels: Sequence[tuple[int, int]], of: Ints, near: Ints) -> tuple[Step, ...]:
    # By the downset of the next size, so that the neighbours of each are consecutive.
    order = np.lexsort((near, of))
    of, near = of[order], near[order]
    steps = []
    for (first_before, _), (first, stop) in pairwise(levels):
        offsets = np.searchsorted(of, np.arange(first, stop + 1))
        steps.append(
            Step(
                first=first,
                stop=stop,
                first_before=first_before,
                near=near[offsets[0] : offsets[-1]],
                offsets=offsets[:-1] - offsets[0],
            )
        )
    return tuple(steps)
