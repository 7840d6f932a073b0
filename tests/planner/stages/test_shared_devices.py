"""Recomputed layers where devices have several stages: equal to trying every set of layers of every stage."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.planner.branch_and_bound.problem import Layout, Problem
from bapipe.planner.branch_and_bound.search import best_below
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.layout_search import search_layouts
from bapipe.planner.stages import recomputation
from bapipe.planner.stages.intervals import INF
from bapipe.schedules import LOOPED
from bapipe.schedules.table import stages_of_ranks
from bapipe.simulator.memory import peak_memory
from tests.oracles.exhaustive_layouts import layouts
from tests.random_profiles import random_cluster, random_profile, with_host_times


def every_choice(problem: Problem, layout: Layout) -> Iterator[tuple[int, Layout]]:
    """Yields each set of layers with which the stages fit, and its step; none on devices that need none."""
    plain = dataclasses.replace(layout, recompute=(frozenset(),) * len(layout.placements))
    own = stages_of_ranks(problem.compiled(layout.placements)[0])
    lacking = {s for rank, short in problem.shortfall_bytes(plain).items() if short > 0 for s in own[rank]}
    if lacking and problem.lower_bound.costs.memory.recomputation is None:
        return
    options = [_subsets(*of) if s in lacking else [frozenset[int]()] for s, of in enumerate(pairwise(layout.cuts))]
    for recompute in product(*options):
        chosen = dataclasses.replace(plain, recompute=recompute)
        if max(problem.shortfall_bytes(chosen).values()) <= 0:
            yield problem.step_ns(chosen), chosen


def _subsets(begin: int, end: int) -> list[frozenset[int]]:
    bits = range(2 ** (end - begin))
    return [frozenset(begin + i for i in range(end - begin) if of >> i & 1) for of in bits]


def tight(seed: int, schedule: str, *, host_times: bool = False) -> list[Problem]:
    """Problems on devices with less memory than any layout needs that recomputes nothing."""
    random = Random(seed)
    profile = random_profile(random, 4, (1,), splits_badly=seed % 2 == 1, frozen=seed % 3 == 0)
    profile = with_host_times(random, profile) if host_times else profile
    (measured,) = profile.measurements
    layers = tuple(replace(layer, stash_bytes=10 * layer.stash_bytes) for layer in measured.layers)
    profile = replace(profile, measurements=(replace(measured, layers=layers),))
    speeds = [1.0, 1.0] if random.random() < 0.5 else [1.0, 0.8]
    drawn = random_cluster(random, 2)
    of = zip(drawn.devices, speeds, strict=True)
    cluster = replace(drawn, devices=tuple(replace(device, memory_bytes=2**40, speed=speed) for device, speed in of))
    options = PlanOptions(minibatch_size=random.randint(3, 5), schedules=[schedule])
    plenty = build_space({"a": profile}, cluster, options, sizes=[1]).problems
    every = [(problem, layout) for problem in plenty for layout in layouts(problem)]
    needed = min(_largest_peak(problem, layout) for problem, layout in every)
    least = min(_largest_peak(problem, _recomputed(layout)) for problem, layout in every)
    limit = max(0, int(needed + (min(least, needed) - needed) * random.uniform(0.0, 1.3)))
    options = dataclasses.replace(options, memory_limit_bytes=limit)
    return [each for each in build_space({"a": profile}, cluster, options, sizes=[1]).problems if each.roots]


def _largest_peak(problem: Problem, layout: Layout) -> int:
    return max(peak.total for peak in peak_memory(problem.compiled(layout.placements)[0], problem.stages(layout)))


def _recomputed(layout: Layout) -> Layout:
    return dataclasses.replace(layout, recompute=tuple(frozenset(range(*of)) for of in pairwise(layout.cuts)))


def least_step(problems: Sequence[Problem]) -> tuple[int, Layout] | None:
    """The fastest of all layouts with any layers recomputed."""
    steps = [found for problem in problems for layout in layouts(problem) for found in every_choice(problem, layout)]
    return min(steps, key=lambda found: found[0], default=None)


@pytest.mark.parametrize("schedule", LOOPED)
def test_no_plan_is_missed_and_no_bound_is_above_the_fastest(schedule: str) -> None:
    recomputed = close = 0
    for seed in range(16):
        problems = tight(seed, schedule)
        want, found = least_step(problems), search_layouts(problems, max_nodes=20_000) if problems else None
        assert (want is None) == (found is None), seed
        if want is None or found is None:
            continue
        assert found.lower_bound_ns <= want[0] <= found.step_ns, seed
        assert max(found.problem.shortfall_bytes(found.layout).values()) <= 0
        assert found.problem.simulate(found.layout).step_ns == found.step_ns
        if any(found.layout.recompute):
            recomputed += 1
            # Where devices stall while they transfer, the longest path is shorter than the step.
            close += found.step_ns - found.lower_bound_ns <= 0.02 * found.step_ns
    assert recomputed > 1
    assert close >= 0.3 * recomputed


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_the_bound_of_each_layout_is_below_every_choice(schedule: str) -> None:
    num_exact = num_least = num_chosen = 0
    for seed in range(8):
        for problem in tight(seed, schedule, host_times=seed % 4 == 3):
            for layout in layouts(problem):
                steps = [step_ns for step_ns, _ in every_choice(problem, layout)]
                fits = problem.fits(layout)
                assert fits == bool(steps), seed
                if not fits or not any(layout.recompute):
                    continue
                step_ns = problem.step_ns(layout)
                assert layout.bound_ns <= min(steps) <= step_ns
                assert not layout.is_best or step_ns == min(steps)
                num_chosen += 1
                num_least += step_ns == min(steps)
                num_exact += layout.is_best
    assert num_chosen > 3
    assert num_least >= 0.9 * num_chosen
    assert num_exact > 1


def test_no_layout_that_fits_with_all_layers_recomputed_is_lost_if_frontiers_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recomputation, "FEW_LABELS", 1)
    monkeypatch.setattr(recomputation, "MAX_LABELS_TOGETHER", 1)
    num_fitting = 0
    for seed in (12, 28, 34):
        for problem in tight(seed, "looped-bfs"):
            for layout in layouts(problem):
                own = stages_of_ranks(problem.compiled(layout.placements)[0])
                plain = dataclasses.replace(layout, recompute=(frozenset(),) * len(layout.placements))
                lacking = {s for rank, short in problem.shortfall_bytes(plain).items() if short > 0 for s in own[rank]}
                every = _recomputed(layout).recompute
                recompute = tuple(of if s in lacking else frozenset[int]() for s, of in enumerate(every))
                whole = dataclasses.replace(layout, recompute=recompute)
                if lacking and max(problem.shortfall_bytes(whole).values()) <= 0:
                    assert problem.fits(layout), seed
                    num_fitting += 1
    assert num_fitting > 5


@pytest.mark.parametrize("seed", [0, 1, 13])
def test_a_search_below_a_step_bounds_plans_with_other_recomputed_layers(seed: int) -> None:
    problems = tight(seed, "1f1b-2bp", host_times=True)
    fastest = least_step(problems)
    assert fastest is not None
    _, bound_ns = best_below(problems, INF, max_gap=0.0, max_nodes=20_000)
    assert bound_ns <= fastest[0]
