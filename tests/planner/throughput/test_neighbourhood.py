"""The neighbourhood of downsets: hand cases."""

from bapipe.graph.layer_graph import Graph
from bapipe.planner.throughput.neighbourhood import neighbouring_downsets

DIAMOND = Graph(names=("top", "left", "right", "bottom"), arcs=frozenset({(0, 1), (0, 2), (1, 3), (2, 3)}))


def test_one_node_is_added_or_removed() -> None:
    """Of {top, left}: with right, or without left; top stays, because left needs it, and bottom needs right."""
    assert neighbouring_downsets(DIAMOND, [0b0011], 3) == [0b0001, 0b0011, 0b0111]


def test_the_start_downsets_are_always_included() -> None:
    assert neighbouring_downsets(DIAMOND, [0b0000, 0b1111], 1) == [0b0000, 0b1111]


def test_enough_neighbours_include_all_downsets() -> None:
    every = [0b0000, 0b0001, 0b0011, 0b0101, 0b0111, 0b1111]
    assert neighbouring_downsets(DIAMOND, [0b0000], 100) == every
