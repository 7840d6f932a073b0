"""The bound of fixed placements: no path is longer than the simulated step, and no bound above any cuts' step."""

from collections.abc import Iterator
from itertools import combinations
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.fixed_placements.matrix_game import solve_game
from bapipe.planner.fixed_placements.naive_cuts import Cuts, naive_cuts
from bapipe.planner.fixed_placements.path_bound import PathBound
from bapipe.planner.fixed_placements.placed_pipeline import PlacedPipeline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.stages.placements import StagePlacement
from bapipe.schedules import LOOPED
from tests.builders import chain, devices
from tests.oracles.exhaustive_layouts import pipelines
from tests.property.test_branch_and_bound import random_pipeline


def random_cuts(random: Random, problem: Problem, num_stages: int, count: int) -> list[Cuts]:
    last = len(problem.cuts) - 1
    every = [(0, *inner, last) for inner in combinations(range(1, last), num_stages - 1)]
    return random.sample(every, min(count, len(every)))


def random_placements(count: int, schedules: tuple[str, ...]) -> Iterator[tuple[Random, Problem, list[StagePlacement]]]:
    """Up to two pipelines of each of so many random problems, with enough layers for their stages."""
    for seed in range(count):
        random = Random(seed)
        problem = random_pipeline(random, schedules[seed % len(schedules)])
        every = [path for root in problem.roots for path in pipelines(root.first_placements)]
        for placements in random.sample(every, min(2, len(every))):
            if len(placements) < len(problem.cuts):
                yield random, problem, list(placements)


@pytest.mark.parametrize("schedules", [tuple(LOOPED), ("1f1b", "gpipe", "zb-h1", "2f2b", "1f1b-2bp")])
def test_no_path_is_longer_than_the_simulated_step_of_any_cuts(schedules: tuple[str, ...]) -> None:
    num_checked = num_equal = 0
    for random, problem, placements in random_placements(12, schedules):
        pipeline = PlacedPipeline(problem, tuple(placements))
        cuts = random_cuts(random, problem, len(placements), 12)
        times, _ = pipeline.time_vectors(cuts)
        step_ns = [problem.simulate(problem.layout(each, tuple(placements))).step_ns for each in cuts]
        for own, vector in zip(step_ns, times, strict=True):
            length, weights = pipeline.longest_path(vector)
            assert length == weights @ vector <= own
            # The same path has a length for every other cuts, too.
            assert all(np.array(step_ns) >= times @ weights)
            num_checked += 1
            num_equal += length == own
    assert num_checked > 30
    assert num_equal > num_checked // 3


@pytest.mark.parametrize("schedules", [tuple(LOOPED), ("1f1b", "gpipe", "zb-h1", "2f2b", "1f1b-2bp")])
def test_no_cuts_beat_the_bound(schedules: tuple[str, ...]) -> None:
    num_checked = num_tight = 0
    for random, problem, placements in random_placements(12, schedules):
        pipeline = PlacedPipeline(problem, tuple(placements))
        game = PathBound(pipeline, {})
        for cuts in naive_cuts(problem, placements):
            game.add_cuts(cuts)
        for _ in range(3):
            game.play_round()
        found = [pipeline.step_ns(cuts) for cuts in random_cuts(random, problem, len(placements), 25)]
        step_ns = [each for each in found if each is not None]
        if step_ns:
            assert game.bound_ns <= min(step_ns)
            num_checked += 1
            num_tight += game.bound_ns > 0.9 * min(step_ns)
    assert num_checked > 6
    assert num_tight > num_checked // 3


def looped_problem(schedule: str, num_layers: int, num_devices: int, num_microbatches: int) -> Problem:
    profile = chain([3 + i % 4 for i in range(num_layers)], output_bytes=100_000)
    cluster = devices(num_devices, bytes_per_s=10**9)
    options = PlanOptions(minibatch_size=num_microbatches, schedules=[schedule])
    (problem,) = build_space({"a": profile}, cluster, options, sizes=[1]).problems
    return problem


def test_the_bound_without_an_order_of_the_devices_holds_for_all_orders() -> None:
    num_checked = 0
    for seed in range(8):
        random = Random(seed)
        problem = random_pipeline(random, random.choice(["interleaved-1f1b", "zb-v"]))
        for root in problem.roots:
            (placements,) = pipelines(root.first_placements)
            if len(placements) >= len(problem.cuts):
                continue
            game = PathBound(PlacedPipeline(problem, placements, in_any_order=True), {})
            for cuts in naive_cuts(problem, placements):
                game.add_cuts(cuts)
            game.play_round()
            for other in problem.roots:
                if other.num_of_class == root.num_of_class:
                    (reordered,) = pipelines(other.first_placements)
                    (cuts,) = random_cuts(random, problem, len(placements), 1)
                    assert game.bound_ns <= problem.simulate(problem.layout(cuts, reordered)).step_ns
                    num_checked += 1
    assert num_checked > 20


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v", "v-half"])
def test_the_bound_is_near_the_step_of_equal_times(schedule: str) -> None:
    problem = looped_problem(schedule, 64, 4, 12)
    root = max(problem.roots, key=lambda root: root.num_devices)
    (placements,) = pipelines(root.first_placements)
    pipeline = PlacedPipeline(problem, placements)
    game = PathBound(pipeline, {})
    steps = []
    for cuts in naive_cuts(problem, placements):
        game.add_cuts(cuts)
        steps.append(pipeline.step_ns(cuts))
    for _ in range(25):
        game.play_round()
    # All work at the speed of all devices leaves a gap more than twice as large.
    best = min(step for step in steps if step is not None)
    assert game.bound_ns <= best <= 1.1 * game.bound_ns
    assert best - game.bound_ns < (best - root.bound_ns) / 2


def test_the_minimum_over_cuts_equals_that_over_every_cuts() -> None:
    problem = looped_problem("interleaved-1f1b", 9, 2, 4)
    (placements,) = pipelines(problem.roots[-1].first_placements)
    pipeline = PlacedPipeline(problem, placements)
    every = [(0, *inner, 9) for inner in combinations(range(1, 9), len(placements) - 1)]
    times, fits = pipeline.time_vectors(every)
    assert fits.all()
    random = Random(0)
    for _ in range(20):
        weights = np.array([random.randrange(4) for _ in range(times.shape[1])])
        found = pipeline.min_cuts(weights)
        assert found is not None
        assert found[0] == (times @ weights).min()
        assert times[every.index(found[1])] @ weights == found[0]


def test_intervals_as_slow_as_a_limit_are_left_out() -> None:
    problem = looped_problem("interleaved-1f1b", 9, 2, 4)
    (placements,) = pipelines(problem.roots[-1].first_placements)
    pipeline = PlacedPipeline(problem, placements)
    weights = np.ones(pipeline.time_vectors([(0, 2, 4, 6, 9)])[0].shape[1], dtype=np.int64)
    assert pipeline.min_cuts(weights) is not None
    pipeline.forbid_slow(1)
    assert pipeline.min_cuts(weights) is None


def test_a_game_is_solved_to_its_value() -> None:
    # Rock, paper, scissors has the value 0; the second game mixes its rows 3 to 1, and its columns 1 to 1.
    for payoffs, value in (([[0, -9, 9], [9, 0, -9], [-9, 9, 0]], 0.0), ([[3, 1], [0, 6]], 2.25)):
        game = np.array(payoffs, dtype=float)
        rows, columns = solve_game(game, 500)
        assert (rows @ game / rows.sum()).min() == pytest.approx(value, abs=0.05)
        assert (game @ columns / columns.sum()).max() == pytest.approx(value, abs=0.05)


def test_long_times_leave_the_bound_valid() -> None:
    profile = chain([3 + i % 4 for i in range(12)])
    (measurement,) = profile.measurements
    slow = tuple(replace(layer, forward_ns=2**40) for layer in measurement.layers)
    profile = replace(profile, measurements=(replace(measurement, layers=slow),))
    options = PlanOptions(minibatch_size=8, schedules=["interleaved-1f1b"])
    (problem,) = build_space({"a": profile}, devices(2), options, sizes=[1]).problems
    (placements,) = pipelines(problem.roots[-1].first_placements)
    game = PathBound(PlacedPipeline(problem, placements), {})
    (cuts, *_) = naive_cuts(problem, placements)
    game.add_cuts(cuts)
    game.play_round()
    step_ns = game.pipeline.step_ns(cuts)
    assert step_ns is not None
    assert 0 < game.bound_ns <= step_ns
