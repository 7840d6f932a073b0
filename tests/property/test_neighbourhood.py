"""Downsets near others: every one of them is a downset, and enough of them are all there are."""

from functools import partial
from random import Random

from bapipe.graph.downsets import downsets, prefixes
from bapipe.graph.layer_graph import of_layers, topological_order
from bapipe.planner.results.solution import make_plan
from bapipe.planner.throughput.neighbourhood import neighbouring_downsets
from bapipe.planner.throughput.search import explore_throughput
from tests.random_graphs import branching_profile
from tests.random_profiles import same_devices


def test_the_neighbourhood_grows_to_all_downsets() -> None:
    random, wide = Random(0), 0
    for _ in range(40):
        graph = of_layers(branching_profile(random, random.randint(2, 9)))
        everything = downsets(graph, 10_000)
        assert everything is not None
        some = prefixes(topological_order(graph))
        assert sorted(neighbouring_downsets(graph, some, 10_000)) == sorted(everything)
        most = random.randint(len(some), len(everything))
        found = neighbouring_downsets(graph, some, most)
        assert set(some) <= set(found) <= set(everything)
        assert len(found) == most
        wide += len(everything) > len(some)
    assert wide > 20


def test_a_search_near_the_best_cuts_helps_and_stays_above_the_minimum() -> None:
    helped = 0
    for seed in range(60):
        random = Random(seed)
        profile, cluster = branching_profile(random, 9), same_devices(random, 3)
        explore = partial(
            explore_throughput, {"a": profile}, cluster, minibatch_size=4, microbatch_sizes=[1], limits=[2**40] * 3
        )
        best = make_plan(explore())
        improved = make_plan(explore(max_downsets=5))
        before = make_plan(explore(max_downsets=5, max_neighbours=0))
        loads = [plan.prediction.load_ns or 0 for plan in (best, improved, before)]
        assert loads == sorted(loads), seed
        assert improved.certificate.lower_bound_ns <= loads[0], seed
        helped += loads[1] < loads[2]
    assert helped > 3
