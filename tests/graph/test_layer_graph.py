"""Downsets, orders and contractions against their definitions."""

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapipe.errors import InvalidFile, InvalidModel
from bapipe.formats.multigraph import to_networkx
from bapipe.graph.downsets import downsets, members, prefixes
from bapipe.graph.layer_graph import (
    Graph,
    check_connected,
    contract,
    depth_first_order,
    of_layers,
    topological_order,
)
from tests.random_graphs import branching_profile
from tests.strategies import drawn, examples


def graph(num_nodes: int, *arcs: tuple[int, int]) -> Graph:
    return Graph(names=tuple("abcdefghij"[:num_nodes]), arcs=frozenset(arcs))


def is_downset(of: Graph, nodes: int) -> bool:
    return all(of.before[node] & ~nodes == 0 for node in members(nodes))


def random_graph(random: Random, num_nodes: int) -> Graph:
    """No cycle, the nodes in no particular order."""
    names = random.sample(range(num_nodes), num_nodes)
    arcs = [(names[a], names[b]) for a, b in combinations(range(num_nodes), 2) if random.random() < 0.3]
    return graph(num_nodes, *arcs)


def graphs(min_nodes: int, max_nodes: int) -> st.SearchStrategy[Graph]:
    return drawn(lambda random: random_graph(random, random.randint(min_nodes, max_nodes)))


def test_a_diamond_has_six_downsets() -> None:
    diamond = graph(4, (0, 1), (0, 2), (1, 3), (2, 3))
    assert downsets(diamond, 100) == [0b0, 0b1, 0b11, 0b101, 0b111, 0b1111]
    assert downsets(diamond, 6) is not None
    assert downsets(diamond, 5) is None


@examples(300)
@given(graphs(1, 8))
def test_downsets_contain_all_predecessors_of_their_nodes(found: Graph) -> None:
    want = {
        nodes for nodes in range(2**found.num_nodes) if all(nodes >> a & 1 for a, b in found.arcs if nodes >> b & 1)
    }
    got = downsets(found, 10**6)
    assert got is not None
    assert len(got) == len(want)
    assert set(got) == want
    assert [n.bit_count() for n in got] == sorted(n.bit_count() for n in want)
    assert all(is_downset(found, nodes) == (nodes in want) for nodes in range(2**found.num_nodes))


@examples(100)
@given(graphs(1, 9))
def test_every_order_is_topological(found: Graph) -> None:
    for order in (
        topological_order(found),
        depth_first_order(found),
        depth_first_order(found, reverse=True),
        topological_order(found, [-i for i in range(found.num_nodes)]),
    ):
        assert sorted(order) == list(range(found.num_nodes))
        assert all(order.index(a) < order.index(b) for a, b in found.arcs)
        assert all(is_downset(found, nodes) for nodes in prefixes(order))


def test_depth_first_finishes_a_branch_before_the_next() -> None:
    towers = graph(7, (0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6))
    assert depth_first_order(towers) == (0, 1, 2, 3, 4, 5, 6)
    assert depth_first_order(towers, reverse=True) == (3, 4, 5, 0, 1, 2, 6)
    assert topological_order(towers, [0, 2, 4, 1, 3, 5, 6]) == (0, 3, 1, 4, 2, 5, 6)


def test_contraction_merges_overlapping_groups_and_cycles() -> None:
    chain = graph(6, (0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
    joined, parts = contract(chain, [(1, 3), (4,)])
    assert parts == ((0,), (1, 2, 3), (4,), (5,))
    assert joined == Graph(names=("a", "b", "e", "f"), arcs=frozenset({(0, 1), (1, 2), (2, 3)}))
    assert contract(chain, [(0, 1), (1, 2), (4, 5)])[1] == ((0, 1, 2), (3,), (4, 5))
    assert contract(chain, [(0, 5)])[1] == ((0, 1, 2, 3, 4, 5),)


@examples(200)
@given(graphs(2, 8), st.data())
def test_contraction_keeps_the_downsets_that_split_no_group(found: Graph, data: st.DataObject) -> None:
    pairs = st.permutations(range(found.num_nodes)).map(lambda nodes: nodes[:2])
    groups = data.draw(st.lists(pairs, max_size=2))
    joined, parts = contract(found, groups)
    got = {sum(1 << node for part in members(nodes) for node in parts[part]) for nodes in downsets(joined, 10**6) or ()}
    whole = [sum(1 << node for node in group) for group in groups]
    want = {n for n in downsets(found, 10**6) or () if all(n & group in (0, group) for group in whole)}
    assert got == want
    assert topological_order(joined) == tuple(range(joined.num_nodes))


def test_a_cycle_is_named() -> None:
    looped = graph(5, (0, 1), (1, 2), (2, 3), (3, 1), (3, 4))
    with pytest.raises(InvalidModel) as caught:
        topological_order(looped)
    assert str(caught.value) == "the layers depend on each other in a cycle: b -> c -> d -> b"


def test_an_edge_to_an_unknown_node_is_refused() -> None:
    with pytest.raises(ValueError, match=r"arc \(0, 2\) joins no two of 2 nodes"):
        graph(2, (0, 2))


def test_a_cycle_through_few_of_many_nodes_is_named() -> None:
    looped = graph(6, (0, 5), (5, 2), (2, 4), (4, 5), (1, 3))
    with pytest.raises(InvalidModel, match=r"in a cycle: f -> c -> e -> f"):
        topological_order(looped)


def test_ties_between_nodes_go_to_the_lowest_number_or_the_lowest_preference() -> None:
    bush = graph(6, (0, 4), (0, 3), (5, 1), (5, 2))
    assert topological_order(bush) == (0, 3, 4, 5, 1, 2)
    assert topological_order(bush, [1, 2, 9, 4, 3, 0]) == (5, 0, 1, 4, 3, 2)


def test_a_chain_has_a_single_order() -> None:
    assert graph(3, (0, 1), (1, 2), (0, 2)).has_single_order
    assert not graph(3, (0, 1), (0, 2)).has_single_order
    assert not graph(3, (0, 1), (1, 2), (2, 0)).has_single_order


def test_disconnected_layers_are_refused() -> None:
    pairs = graph(5, (0, 2), (1, 4))
    check_connected(pairs, [(2, 3), (3, 4)])
    with pytest.raises(InvalidFile) as caught:
        check_connected(pairs, [(2, 3)])
    assert "fall into 2 parts that share no tensor: 'a' is in one of 3, 'b' in one of 2" in str(caught.value)


def test_networkx_has_layers_as_nodes_and_tensors_as_edges() -> None:
    profile = branching_profile(Random(5), 6)
    found = to_networkx(profile)
    assert list(found.nodes) == [layer.name for layer in profile.layers]
    name, size = profile.layers[0].name, profile.microbatch_sizes[0]
    assert found.nodes[name]["param_bytes"] == profile.layers[0].param_bytes
    assert found.nodes[name]["measurements"][size] == profile.at(size)[0]
    arcs = {(profile.layers[a].name, profile.layers[b].name) for a, b in of_layers(profile).arcs}
    assert {(source, target) for source, target, _ in found.edges} == arcs
    for source, target, tensor in found.edges:
        place = found.nodes[source]["outputs"].index(tensor)
        num_bytes = found.nodes[source]["measurements"][size].output_bytes[place]
        assert found.adj[source][target][tensor]["num_bytes"][size] == num_bytes


def test_layers_are_joined_by_their_tensors() -> None:
    profile = branching_profile(Random(5), 6)
    place = {layer.name: i for i, layer in enumerate(profile.layers)}
    arcs = {
        (int(tensor[1:]), place[layer.name]) for layer in profile.layers for tensor in layer.inputs if tensor != "x"
    }
    assert of_layers(profile) == Graph(names=tuple(place), arcs=frozenset(arcs))
