"""Every lower bound by its name: never above the simulator if used alone, and needed in a share of random cases."""

from collections.abc import Iterator, Sequence, Set
from copy import copy
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.formats.cluster import Bandwidth
from bapipe.planner.branch_and_bound.lower_bound import LowerBound
from bapipe.planner.branch_and_bound.problem import Layout, Problem
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.branch_and_bound.stage_bound import (
    BOUND_NAMES,
    FORWARDS_FIRST,
    LAST_MICROBATCH,
    LINK,
    RETURN,
    ROUND_TRIP,
    SHARED_DEVICE,
    WORK,
    ZIGZAG,
)
from bapipe.planner.inputs.options import PlanOptions
from tests.property.test_branch_and_bound import Prefixes, random_pipeline
from tests.random_profiles import random_cluster, random_profile

ONE_STAGE = ("1f1b", "1f1b+1", "eager-1f1b", "2f2b", "zb-h1", "gpipe")
"""Schedules with one stage per device."""

SCHEDULES_OF = {
    WORK: ONE_STAGE,
    RETURN: ONE_STAGE,
    LINK: ONE_STAGE,
    ROUND_TRIP: ONE_STAGE,
    LAST_MICROBATCH: ONE_STAGE,
    ZIGZAG: ("1f1b", "1f1b+1"),
    SHARED_DEVICE: ("interleaved-1f1b", "zb-v"),
    FORWARDS_FIRST: ("gpipe", "gpipe-2bp"),
}

MIN_SHARE = {
    WORK: 0.1,
    RETURN: 0.1,
    LINK: 0.03,
    ROUND_TRIP: 0.05,
    LAST_MICROBATCH: 0.02,
    ZIGZAG: 0.01,
    SHARED_DEVICE: 0.5,
    FORWARDS_FIRST: 0.15,
}
"""In at least this share of random plans, leaving the bound out lowers the bound of one of their partial plans."""


def with_bounds(problem: Problem, enabled: Set[str], finish_limits_ns: Sequence[int] = ()) -> Problem:
    """The problem with some of the bounds only, and one finish class or those between some thresholds."""
    changed = copy(problem)
    changed.lower_bound = LowerBound(
        problem.lower_bound.costs,
        problem.num_microbatches,
        forwards_first=problem.lower_bound.cost_to_go.forwards_first,
        finish_limits_ns=finish_limits_ns,
        enabled=enabled,
    )
    return changed


def random_layout(random: Random, problem: Problem) -> Layout | None:
    """Random devices, placements and cuts; None if there are fewer layers than stages."""
    placements = [random.choice(random.choice(problem.roots).first_placements)]
    while not placements[-1].is_last:
        placements.append(random.choice(placements[-1].successors))
    last = len(problem.cuts) - 1
    if len(placements) > last:
        return None
    inner = sorted(random.sample(range(1, last), len(placements) - 1))
    return problem.layout((0, *inner, last), tuple(placements))


def with_slow_links(random: Random, schedule: str, num_microbatches: int) -> Problem:
    """Transfers that take as long as stages do, beside compute: then links, and round trips over them, are critical."""
    profile, cluster = random_profile(random, random.randint(3, 6)), random_cluster(random, random.randint(2, 4))
    devices = tuple(replace(d, overlaps_transfers=True, memory_bytes=2**32) for d in cluster.devices)
    slow = Bandwidth(bytes_per_s=10**8, latency_ns=random.randrange(400))
    cluster = replace(cluster, devices=devices, intra_host=slow, inter_host=slow)
    (problem,) = build_space(
        {"a": profile},
        cluster,
        PlanOptions(
            minibatch_size=num_microbatches, schedules=[schedule], replicas=random.random() < 0.5, recompute=False
        ),
        sizes=[1],
    ).problems
    return problem


def random_plans(name: str) -> Iterator[tuple[int, Problem, Layout]]:
    """Plans to hold a bound to, each with its seed."""
    for seed in range(20):
        random = Random(seed)
        schedule = random.choice(SCHEDULES_OF[name])
        if name in (LINK, ZIGZAG):
            problem = with_slow_links(random, schedule, random.randint(8, 24))
        else:
            problem = random_pipeline(random, schedule)
        for _ in range(4 if problem.roots else 0):
            layout = random_layout(random, problem)
            if layout is not None:
                yield seed, problem, layout


def check_bounds(seed: int, problem: Problem, layout: Layout) -> None:
    """Every prefix of the plan has a bound, and none exceeds the simulated step."""
    bounds_ns, step_ns = list(Prefixes(problem).bounds_of(layout)), problem.simulate(layout).step_ns
    case = f"seed {seed}: {problem.schedule}, cuts {layout.cuts}, bounds {bounds_ns}, step {step_ns}"
    assert len(bounds_ns) == len(layout.placements) + 1, case
    assert max(bounds_ns) <= step_ns, case


def test_every_bound_is_tested() -> None:
    assert set(SCHEDULES_OF) == set(MIN_SHARE) == BOUND_NAMES


@pytest.mark.parametrize("name", sorted(BOUND_NAMES))
def test_bound_alone_never_exceeds_the_simulator(name: str) -> None:
    # "zigzag" says when the last micro-batch starts: without "last micro-batch" nothing follows from it.
    enabled = {ZIGZAG, LAST_MICROBATCH} if name == ZIGZAG else {name}
    plans = 0
    for seed, problem, layout in random_plans(name):
        check_bounds(seed, with_bounds(problem, enabled), layout)
        plans += 1
    assert plans > 40


@pytest.mark.parametrize("name", [WORK, RETURN, LINK, ROUND_TRIP, LAST_MICROBATCH])
def test_bound_never_exceeds_the_step_of_one_micro_batch(name: str) -> None:
    """With one micro-batch nothing waits: a transfer or a phase that a bound counts twice exceeds the step."""
    plans = 0
    for seed in range(12):
        random = Random(seed)
        problem = with_bounds(with_slow_links(random, random.choice(ONE_STAGE), 1), {name})
        for _ in range(3):
            layout = random_layout(random, problem)
            if layout is not None:
                check_bounds(seed, problem, layout)
                plans += 1
    assert plans > 20


def test_bounds_by_sync_class_never_exceed_the_simulator() -> None:
    """The bound is the minimum over the classes: a maximum would be infinite if a class has no completion."""
    num_classes = set()
    for seed, problem, layout in random_plans(WORK):
        step_ns = problem.simulate(layout).step_ns
        limits_ns = [step_ns // divisor for divisor in (50, 20, 5)]
        problem = with_bounds(problem, BOUND_NAMES, limits_ns)
        check_bounds(seed, problem, layout)
        for placement, begin, end in zip(layout.placements, layout.cuts, layout.cuts[1:], strict=False):
            first, last = problem.cuts.index(begin), problem.cuts.index(end)
            finish_ns = problem.lower_bound.costs.candidates_from(placement, first).finish_ns[last - first - 1]
            num_classes.add(sum(limit_ns < finish_ns for limit_ns in limits_ns))
    assert num_classes == {0, 1, 2, 3}


@pytest.mark.parametrize("name", sorted(BOUND_NAMES))
def test_bound_is_needed(name: str) -> None:
    needed = plans = 0
    for seed, problem, layout in random_plans(name):
        with_all = list(Prefixes(with_bounds(problem, BOUND_NAMES)).bounds_of(layout))
        without = list(Prefixes(with_bounds(problem, BOUND_NAMES - {name})).bounds_of(layout))
        assert all(a >= b for a, b in zip(with_all, without, strict=True)), (seed, name, with_all, without)
        needed += with_all != without
        plans += 1
    assert needed >= MIN_SHARE[name] * plans, needed / plans
