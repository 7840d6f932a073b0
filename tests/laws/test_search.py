"""The exact search equals the exhaustive one, and its bounds never exceed what the judge says."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.errors import BapipeError, Infeasible
from bapipe.schedules import LOOPED, SCHEDULES
from bapipe.search.best_first import best_first
from bapipe.search.bounds import Bounds
from bapipe.search.chain import Chain
from bapipe.search.closest import closest
from bapipe.search.exhaustive import exhaustive
from bapipe.search.explore import distinct_choices, explore
from bapipe.search.problem import Problem
from bapipe.simulate import simulate
from tests.random_profiles import random_cluster, random_profile


def random_problems(
    seed: int, schedules: Sequence[str] = ("1f1b", "gpipe"), splits_badly: bool = False
) -> list[Problem]:
    """Some schedules at one or two micro-batch sizes, on the same devices."""
    random = Random(seed)
    num_layers = random.randint(1, 8)
    num_stages = random.randint(1, min(4, num_layers))
    profile = random_profile(random, num_layers, splits_badly=splits_badly)
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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_best_first_is_exact_where_the_split_has_a_price(schedule: str) -> None:
    for seed in range(40):
        problems = random_problems(seed, [schedule], splits_badly=True)
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
        every = list(SCHEDULES) if seed < 100 else ("1f1b", "gpipe")
        for problem in random_problems(seed, every, splits_badly=seed % 2 == 0):
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
        for problem in random_problems(seed, ("1f1b", "zb-h1"), splits_badly=seed % 2 == 0):
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


def test_layers_that_share_parameters_stay_together() -> None:
    profile = random_profile(Random(7), 8)
    tied = {1: "l4", 4: "l1"}
    layers = tuple(replace(layer, shares=(tied[i],) if i in tied else ()) for i, layer in enumerate(profile.layers))
    profile = replace(profile, layers=layers)
    cluster = random_cluster(Random(1), 3)
    plan = explore({"a": profile}, cluster, minibatch_size=4, num_stages=3)
    assert any({"l1", "l2", "l3", "l4"} <= set(stage.layers) for stage in plan.stages)
    with pytest.raises(
        BapipeError, match=r"^6 stages asked for; 6 devices, 8 layers and 1f1b, gpipe allow 1, 2, 3, 4, 5$"
    ):
        explore({"a": profile}, random_cluster(Random(1), 6), minibatch_size=4, num_stages=6)


def test_many_devices_are_no_obstacle() -> None:
    profile = random_profile(Random(7), 5)
    one = random_cluster(Random(1), 1)
    device = replace(one.devices[0], memory_bytes=10**9)
    many = replace(one, devices=tuple(replace(device, name=f"d{i}") for i in range(500)), links=())
    assert explore({"a": profile}, many, minibatch_size=8).certificate.proven_optimal


def test_too_many_choices_of_devices_are_said_to_be_left_out() -> None:
    profile = random_profile(Random(7), 5)
    device = replace(random_cluster(Random(1), 1).devices[0], memory_bytes=10**9)
    devices = tuple(replace(device, name=f"d{i}", speed=1.0 + i) for i in range(60))
    many = replace(random_cluster(Random(1), 1), devices=devices, links=())
    assert "only the first devices" in explore({"a": profile}, many, minibatch_size=2).certificate.space


@pytest.mark.parametrize("seed", range(20))
def test_choices_of_devices_leave_none_out(seed: int) -> None:
    """Every ascending choice is like one that is looked at."""
    random = Random(seed)
    cluster = random_cluster(random, 5)
    slow, fast = cluster.devices[0], replace(cluster.devices[1], speed=9.0)
    devices = tuple(replace(random.choice([slow, fast]), name=f"d{i}", host=f"h{i // 2}") for i in range(5))
    cluster = replace(cluster, devices=devices)
    limits = [device.memory_bytes for device in devices]

    def like(ranks: tuple[int, ...]) -> object:
        own = [(devices[r].kind, devices[r].speed, devices[r].overlaps_transfers, limits[r]) for r in ranks]
        return own, [(cluster.link(a, b), cluster.link(b, a)) for a, b in pairwise(ranks)]

    for count in range(1, 6):
        choices, whole = distinct_choices(cluster, limits, count)
        assert whole
        looked_at = [like(ranks) for ranks in choices]
        assert all(like(ranks) in looked_at for ranks in combinations(range(5), count))
        assert len(looked_at) == len({str(choice) for choice in looked_at})


def test_a_searched_order_is_never_slower_and_says_what_it_is() -> None:
    searched = 0
    for seed in range(25):
        random = Random(seed)
        profile, cluster = random_profile(random, 6), random_cluster(random, 3)
        try:
            named = explore({"a": profile}, cluster, minibatch_size=4, schedules=("1f1b",))
        except Infeasible:
            continue
        plan = explore({"a": profile}, cluster, minibatch_size=4, schedules=("1f1b", "search"), search_effort=1)
        assert plan.prediction.step_ns <= named.prediction.step_ns
        assert simulate(plan, {"a": profile}).prediction(4) == plan.prediction
        assert plan.certificate.lower_bound_ns <= plan.prediction.step_ns
        assert all(
            rank.peak_bytes <= d.memory_bytes for rank, d in zip(plan.prediction.ranks, cluster.devices, strict=True)
        )
        if plan.schedule == "search":
            searched += 1
            assert plan.stages == named.stages
            assert ("1f1b", named.prediction.step_ns) in [(a.name, a.step_ns) for a in plan.alternatives]
    assert searched > 5
