"""The search of cuts of few pipelines: exact, its sets of cuts lose nothing faster, and its bound holds when it ends early."""

from itertools import combinations
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from bapipe.planner.branch_and_bound.problem import Problem, SearchResult
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.fixed_placements import cut_search
from bapipe.planner.fixed_placements.cut_search import few_pipelines, search_cuts
from bapipe.planner.fixed_placements.naive_cuts import Cuts, naive_cuts
from bapipe.planner.fixed_placements.placed_pipeline import PlacedPipeline
from bapipe.planner.fixed_placements.possible_cuts import all_cuts, minimize
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.layout_search import search_layouts
from bapipe.planner.stages.intervals import INF
from bapipe.schedules import LOOPED
from tests.builders import chain, devices
from tests.oracles.exhaustive_layouts import exhaustive
from tests.oracles.exhaustive_layouts import pipelines as every_pipeline
from tests.problems import random_problems

NAMED = ("1f1b", "gpipe", "zb-h1", "2f2b", "1f1b-2bp")


@pytest.mark.parametrize("schedules", [NAMED, tuple(LOOPED)])
@pytest.mark.parametrize("max_enumerated", [1, 4_000])
def test_equals_the_fastest_of_all_layouts(
    schedules: tuple[str, ...], max_enumerated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_search, "MAX_ENUMERATED", max_enumerated)
    monkeypatch.setattr(cut_search, "MAX_PIPELINES", 10_000)
    num_checked = num_open = 0
    for seed in range(14):
        named = [schedules[seed % len(schedules)]]
        problems = [each for each in random_problems(seed, named, splits_badly=seed % 2 == 1) if each.roots]
        want = exhaustive(problems)
        found = search_cuts(few_pipelines(problems), max_actions=10**8)
        assert (found and found.step_ns) == (want and want.step_ns)
        if found is None:
            continue
        assert found.problem.simulate(found.layout).step_ns == found.step_ns
        # Only layers recomputed otherwise, whose best choice is not known, may leave a gap.
        num_open += found.lower_bound_ns < found.step_ns
        num_checked += 1
    assert num_checked > 5
    assert num_open <= 2


def slow_links(num_layers: int, num_stages: int, seed: int) -> Problem:
    """Layers with outputs of unlike sizes, which take about as long to transfer as to compute."""
    random = Random(seed)
    profile = chain([random.randrange(1, 9) for _ in range(num_layers)])
    (measurement,) = profile.measurements
    layers = tuple(
        replace(layer, output_bytes=(random.choice([100_000, 1_000_000, 8_000_000]),)) for layer in measurement.layers
    )
    profile = replace(profile, measurements=(replace(measurement, layers=layers),))
    options = PlanOptions(minibatch_size=6, num_stages=num_stages, schedules=["1f1b"], replicas=False)
    cluster = devices(num_stages, bytes_per_s=10**9)
    (problem,) = build_space({"a": profile}, cluster, options, sizes=[1]).problems
    return problem


@pytest.mark.parametrize("seed", range(3))
def test_where_transfers_dominate_the_step_is_proven(seed: int) -> None:
    problem = slow_links(14, 4, seed)
    ((_, _, placements),) = few_pipelines([problem])
    pipeline = PlacedPipeline(problem, placements)
    every = [(0, *inner, 14) for inner in combinations(range(1, 14), 3)]
    steps = [step for cuts in every if (step := pipeline.step_ns(cuts)) is not None]
    found = search_layouts([problem], max_nodes=20_000)
    assert found is not None
    assert found.lower_bound_ns == found.step_ns == min(steps)


@pytest.mark.parametrize("first_actions", [500, 3_000_000])
def test_with_limits_below_the_best_step_the_best_is_still_proven(
    first_actions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_search, "FIRST_ACTIONS", first_actions)
    monkeypatch.setattr(cut_search, "MAX_ENUMERATED", 5)
    limits: set[tuple[int, int, bool]] = set()

    class Watched(cut_search._CutSearch):
        def _attempt(self) -> None:
            super()._attempt()
            limits.add((seed, self.limit_ns, not self.queue))
            assert self.proven_ns <= min(steps)  # the bound holds after every attempt

    monkeypatch.setattr(cut_search, "_CutSearch", Watched)
    for seed in range(4):
        problem = slow_links(12, 4, seed)
        ((_, root, placements),) = few_pipelines([problem])
        pipeline = PlacedPipeline(problem, placements)
        every = [(0, *inner, 12) for inner in combinations(range(1, 12), 3)]
        steps = [step for cuts in every if (step := pipeline.step_ns(cuts)) is not None]
        # A layout to begin with: without one the first attempt has no limit.
        layout = problem.layout((0, 1, 2, 3, 12), placements)
        begin = SearchResult(problem=problem, layout=layout, step_ns=problem.step_ns(layout), lower_bound_ns=0)
        found = search_cuts([(problem, root, placements)], max_actions=10**8, incumbent=begin)
        assert found is not None
        assert found.lower_bound_ns == found.step_ns == min(steps)
    # Some attempts had a limit below the best step; small budgets let some of them fail.
    assert any(limit_ns < INF for _, limit_ns, _ in limits)
    assert any(not is_done for _, _, is_done in limits) == (first_actions == 500)


@pytest.mark.parametrize("seed", range(3))
def test_a_search_that_ends_early_has_a_bound_that_holds(seed: int) -> None:
    problem = slow_links(14, 4, seed)
    best = search_cuts(few_pipelines([problem]), max_actions=10**8)
    assert best is not None
    for max_actions in (1, 2_000, 20_000):
        found = search_cuts(few_pipelines([problem]), max_actions=max_actions)
        if found is not None:
            assert found.lower_bound_ns <= best.step_ns <= found.step_ns


def test_no_cuts_below_the_limit_are_removed() -> None:
    num_removed = 0
    for seed in range(6):
        problem = slow_links(9, 3, seed)
        (placements,) = every_pipeline(problem.roots[-1].first_placements)
        pipeline = PlacedPipeline(problem, placements)
        every: list[Cuts] = [(0, *inner, 9) for inner in combinations(range(1, 9), 2)]
        times, _ = pipeline.time_vectors(every)
        lengths = [pipeline.longest_path(each)[0] for each in times]
        weights = np.array(
            [pipeline.longest_path(times[every.index(cuts)])[1] for cuts in naive_cuts(problem, placements)]
        )
        possible = all_cuts(pipeline)
        assert possible.count() == len(every)
        limit_ns = sorted(lengths)[len(lengths) // 2]
        found = minimize(pipeline, weights.astype(float), np.ones(len(weights)), possible, limit_ns)
        assert found.bounds.tolist() == (times @ weights.T).min(axis=0).tolist()
        left = set(map(tuple, found.possible.every().tolist()))
        assert left >= {cuts for cuts, length in zip(every, lengths, strict=True) if length < limit_ns}
        num_removed += len(every) - len(left)
        # Divided cuts are all cuts, each once.
        parts = possible.split(1, 3)
        assert sorted(cuts for part in parts for cuts in map(tuple, part.every().tolist())) == every
    assert num_removed > 20


def test_too_many_pipelines_are_refused() -> None:
    profile, options = chain([3] * 12), PlanOptions(minibatch_size=8, schedules=["1f1b"])
    (problem,) = build_space({"a": profile}, devices(8), options, sizes=[1]).problems
    assert few_pipelines([problem]) == ()
