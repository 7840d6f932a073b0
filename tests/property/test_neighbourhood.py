"""Downsets near others: every one of them is a downset, and enough of them are all there are."""

from random import Random

import pytest

from bapipe.graph.layer_graph import downsets, of_layers, prefixes, topological_order
from bapipe.planner.throughput import search as throughput
from bapipe.planner.throughput.neighbourhood import near
from bapipe.planner.throughput.search import Search, explore_throughput
from tests.property.test_throughput import same_devices
from tests.random_graphs import branching_profile


def test_near_grows_to_all_downsets() -> None:
    random, wide = Random(0), 0
    for _ in range(40):
        graph = of_layers(branching_profile(random, random.randint(2, 9)))
        everything = downsets(graph, 10_000)
        assert everything is not None
        some = prefixes(topological_order(graph))
        assert sorted(near(graph, some, 10_000)) == sorted(everything)
        most = random.randint(len(some), len(everything))
        found = near(graph, some, most)
        assert set(some) <= set(found) <= set(everything)
        assert len(found) == most
        wide += len(everything) > len(some)
    assert wide > 20


def test_cuts_near_the_best_help_and_stay_above_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    helped = 0
    for seed in range(60):
        random = Random(seed)
        profile, cluster = branching_profile(random, 9), same_devices(random, 3)
        asked = {"minibatch_size": 4, "microbatch_sizes": [1], "limits": [2**40] * 3}
        best = explore_throughput({"a": profile}, cluster, **asked)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(throughput, "MAX_DOWNSETS", 5)
            found = explore_throughput({"a": profile}, cluster, **asked)  # type: ignore[arg-type]
            patch.setattr(throughput, "_improved", _as_it_is)
            before = explore_throughput({"a": profile}, cluster, **asked)  # type: ignore[arg-type]
        loads = [plan.prediction.load_ns or 0 for plan in (best, found, before)]
        assert loads == sorted(loads), seed
        assert found.certificate.lower_bound_ns <= loads[0], seed
        helped += loads[1] < loads[2]
    assert helped > 3


def _as_it_is(search: Search, graph: object, parts: object, answer: object, limits: object, tell: object) -> object:
    return answer
