"""Times of a stage computed for the intervals asked for, against the table of all intervals."""

from random import Random

import numpy as np
import pytest

from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.compute.deadline import UNLIMITED
from bapipe.planner.fixed_placements import stage_times
from bapipe.planner.fixed_placements.placed_pipeline import PlacedPipeline
from bapipe.planner.fixed_placements.stage_times import StageTimes
from bapipe.planner.stages.intervals import INF
from bapipe.planner.stages.placements import StagePlacement
from bapipe.schedules import LOOPED
from tests.oracles.exhaustive_layouts import pipelines
from tests.problems import random_problems


def stages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Problem, StageTimes]]:
    """Stages of random problems, some of which recompute, whose tables of all intervals are not used."""
    monkeypatch.setattr(stage_times, "MAX_TABLED", 0)
    found = []
    for seed in range(14):
        limit = (2**40, 400, 200)[seed % 3]
        problems = random_problems(seed, tuple(LOOPED), splits_badly=seed % 4 == 0, host_times=seed > 8, limit=limit)
        random = Random(seed)
        every = [(problem, root) for problem in problems for root in problem.roots]
        for problem, root in random.sample(every, min(12, len(every))):
            (placements,) = pipelines(root.first_placements)
            placement: StagePlacement = random.choice(placements)
            classes = sorted(set(placement.device_classes)) if random.random() < 0.3 else ()
            costs, num = problem.lower_bound.costs, problem.num_microbatches
            found.append((problem, StageTimes(costs, placement, (0, 1, 2, 3), num, classes, UNLIMITED)))
    return found


def test_times_of_intervals_asked_for_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    num_recomputing = 0
    for problem, stage in stages(monkeypatch):
        rows = np.arange(len(problem.lower_bound.costs.intervals.begins))[::-1]
        entries, fits = stage.at(rows)
        assert (entries == stage.every.entries[:, rows]).all()
        assert (fits == stage.every.fits[rows]).all()
        assert (np.array(stage.maxima()) >= stage.every.entries[:, stage.every.fits].max(axis=1, initial=0)).all()
        _, recompute, _ = stage.costs.memory.fitting(stage.placement, rows)
        num_recomputing += int(recompute.any())
    assert num_recomputing > 5


def test_intervals_with_little_work_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    num_left_out = 0
    for _, stage in stages(monkeypatch):
        every = stage.every
        for limit_ns in (1, *sorted(every.work_ns.tolist())[::3], INF):
            found, want = stage.faster_than(limit_ns), np.flatnonzero(every.fits & (every.work_ns < limit_ns))
            assert (found.rows == want).all()
            assert (found.entries == every.entries[:, want]).all()
            num_left_out += len(want) < len(every.rows)
    assert num_left_out > 30


def test_pipelines_take_their_times_from_either(monkeypatch: pytest.MonkeyPatch) -> None:
    num_checked = 0
    for seed in range(6):
        for problem in random_problems(seed, ["zb-v", "interleaved-1f1b"], splits_badly=seed % 2 == 1):
            for root in problem.roots[-2:]:
                (placements,) = pipelines(root.first_placements)
                if len(placements) >= len(problem.cuts):
                    continue
                monkeypatch.undo()
                tabulated = PlacedPipeline(problem, placements)
                cuts = (*range(len(placements)), len(problem.cuts) - 1)
                weights = tabulated.longest_path(tabulated.time_vectors([cuts])[0][0])[1]
                monkeypatch.setattr(stage_times, "MAX_TABLED", 0)
                computed = PlacedPipeline(problem, placements)
                for limit_ns in (INF, tabulated.step_ns(cuts) or INF):
                    for pipeline in (tabulated, computed):
                        pipeline.forbid_slow(limit_ns)
                    assert tabulated.min_cuts(weights) == computed.min_cuts(weights)
                num_checked += 1
    assert num_checked > 6
