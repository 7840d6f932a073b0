"""The exact search equals the exhaustive one, and its bounds never exceed what the judge says."""

from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest

from bapipe.errors import Infeasible
from bapipe.schedules import LOOPED, SCHEDULES
from bapipe.search.best_first import best_first
from bapipe.search.bounds import Bounds
from bapipe.search.chain import Chain
from bapipe.search.closest import closest
from bapipe.search.exhaustive import exhaustive
from bapipe.search.explore import explore
from bapipe.search.problem import Problem
from bapipe.simulate import simulate
from tests.random_profiles import random_cluster, random_profile


def random_problems(seed: int, schedules: Sequence[str] = ("1f1b", "gpipe")) -> list[Problem]:
    """Some schedules at one or two micro-batch sizes, on the same devices."""
    random = Random(seed)
    num_layers = random.randint(1, 8)
    num_stages = random.randint(1, min(4, num_layers))
    profile = random_profile(random, num_layers)
    cluster = random_cluster(random, num_stages)
    num_samples = 4 * random.randint(1, 2)
    return [
        Problem(
            chains=tuple(Chain(profile, size, device.speed) for device in cluster.devices),
            ranks=tuple(range(num_stages)),
            cluster=cluster,
            memory_bytes=tuple(device.memory_bytes for device in cluster.devices),
            schedule=schedule,
            microbatch_size=size,
            num_microbatches=num_samples // size,
        )
        for size in random.sample([1, 2, 3, 4], 2)
        if num_samples % size == 0
        for schedule in schedules
    ]


@pytest.mark.parametrize("block", range(8))
def test_best_first_is_exact(block: int) -> None:
    feasible = 0
    for seed in range(block * 300, block * 300 + 300):
        problems = random_problems(seed)
        want, found = exhaustive(problems), best_first(problems)
        assert (found and found.step_ns) == (want and want.step_ns), seed
        assert found is None or found.lower_bound_ns == found.step_ns, seed
        feasible += want is not None
    assert feasible > 100


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("1f1b", "gpipe")])
def test_best_first_is_exact_for_every_schedule(schedule: str) -> None:
    for seed in range(60):
        problems = random_problems(seed, [schedule])
        want, found = exhaustive(problems), best_first(problems)
        assert (found and found.step_ns) == (want and want.step_ns), seed
        assert found is None or found.lower_bound_ns == found.step_ns, seed


@pytest.mark.parametrize("schedule", LOOPED)
def test_best_first_is_exact_where_devices_have_two_stages(schedule: str) -> None:
    seen = 0
    for seed in range(120):
        problems = [p for p in random_problems(seed, [schedule]) if p.num_stages <= p.num_layers]
        want, found = exhaustive(problems), best_first(problems)
        assert (found and found.step_ns) == (want and want.step_ns), seed
        assert found is None or found.lower_bound_ns == found.step_ns, seed
        seen += want is not None
    assert seen > 30


def test_bounds_never_exceed_the_judge() -> None:
    checked = 0
    for seed in range(400):
        for problem in random_problems(seed, list(SCHEDULES) if seed < 100 else ("1f1b", "gpipe")):
            bounds = Bounds(problem)
            for inner in combinations(range(1, problem.num_layers), problem.num_stages - 1):
                cuts = (0, *inner, problem.num_layers)
                prefixes = [bounds.start()]
                while len(prefixes) < len(cuts):
                    longer = bounds.extend(prefixes[-1], cuts[len(prefixes)])
                    if longer is None:
                        break
                    prefixes.append(longer)
                if len(prefixes) == len(cuts):  # every stage fits
                    step_ns = problem.judge(cuts).step_ns
                    assert problem.step_ns(cuts) == step_ns
                    assert all(bounds.bound_ns(prefix) <= step_ns for prefix in prefixes), (seed, cuts)
                    checked += 1
    assert checked > 1000


def test_memory_of_the_search_is_the_memory_of_the_judge() -> None:
    for seed in range(300):
        for problem in random_problems(seed):
            for inner in list(combinations(range(1, problem.num_layers), problem.num_stages - 1))[:5]:
                cuts = (0, *inner, problem.num_layers)
                judged = [problem.judge(cuts).memory[rank].total for rank in problem.ranks]
                assert judged == [problem.peak_bytes(s, cuts[s], cuts[s + 1]) for s in range(problem.num_stages)]


def test_a_stopped_search_gives_an_honest_bound() -> None:
    stopped = 0
    for seed in range(300):
        problems = random_problems(seed)
        best, found = exhaustive(problems), best_first(problems, limit=1)
        if found is not None and best is not None:
            assert found.lower_bound_ns <= best.step_ns <= found.step_ns
            stopped += found.lower_bound_ns < found.step_ns
    assert stopped > 20


def test_nothing_fits_exactly_when_the_closest_plan_lacks_memory() -> None:
    seen = 0
    for seed in range(300):
        problems = random_problems(seed)
        if exhaustive(problems) is None:
            seen += 1
            message = closest(problems, [f"l{i}" for i in range(problems[0].num_layers)])
            assert "bytes short" in message
    assert seen > 5


def test_explore_gives_a_plan_that_the_judge_repeats() -> None:
    seen = 0
    for seed in range(60):
        random = Random(seed)
        profile = random_profile(random, 6)
        other = random_profile(random, 6, kind="b")
        other = type(other)(**{f: getattr(other, f) for f in other.__struct_fields__} | {"layers": profile.layers})
        cluster = random_cluster(random, 3, ("a", "b"))
        profiles = {"a": profile, "b": other}
        try:
            plan = explore(profiles, cluster, minibatch_size=4)
        except Infeasible:
            continue
        seen += 1
        assert simulate(plan, profiles).prediction(4) == plan.prediction
        assert explore(profiles, cluster, minibatch_size=4) == plan
    assert seen > 30
