"""The cover relation of downsets, against pairs of sets of one node more and less."""

from random import Random

from bapipe.graph.downsets import downsets
from bapipe.graph.layer_graph import Graph
from bapipe.planner.throughput.downset_covers import covers_of


def random_graph(seed: int) -> Graph:
    random = Random(seed)
    num_nodes = random.randint(1, 9)
    arcs = {(i, j) for j in range(num_nodes) for i in range(j) if random.random() < 0.3}
    return Graph(names=tuple(map(str, range(num_nodes))), arcs=frozenset(arcs))


def test_covers_are_the_pairs_that_differ_by_one_node() -> None:
    for seed in range(30):
        graph = random_graph(seed)
        listed = downsets(graph, 1000)
        assert listed is not None
        covers = covers_of(graph, listed)
        pairs = {(i, j) for i, a in enumerate(listed) for j, b in enumerate(listed) if (a ^ b).bit_count() == 1}
        for steps, is_larger in ((covers.growing, True), (covers.shrinking, False)):
            found = [
                (first + step.first, int(near))
                for step in steps
                for first, offset in enumerate(step.offsets)
                for near in step.near[offset : [*step.offsets[1:], len(step.near)][first]]
            ]
            assert sorted(found) == sorted((i, j) for i, j in pairs if (i > j) == is_larger)
            # Every step begins where the one before ended.
            firsts = [step.first for step in steps]
            assert [step.first_before for step in steps] == [0 if is_larger else len(listed) - 1, *firsts[:-1]]
