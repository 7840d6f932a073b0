"""The layers that the stages of a plan recompute are the best ones, by all choices."""

from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.device_line.fewer_recomputed import with_fewer_recomputed
from tests.planner.device_line.test_prefix_bound import plans, tight_line, timed_with_any_recomputed


def test_no_choice_of_layers_of_one_stage_is_faster() -> None:
    faster = 0
    for seed in range(24):
        line = tight_line(seed)
        for plan in plans(line, "gpipe"):
            every = list(timed_with_any_recomputed(line, plan))
            if len(every) > 1 and len(plan.counts) == 1:
                chosen = with_fewer_recomputed(every[0], UNLIMITED)
                assert chosen.step_ns == min(each.step_ns for each in every), (seed, plan)
                faster += chosen.step_ns < every[0].step_ns
    assert faster > 3


def test_it_is_never_slower_and_ends_at_the_deadline() -> None:
    for seed in range(8):
        line = tight_line(seed)
        for timed in filter(None, map(line.time, plans(line, "gpipe"))):
            assert with_fewer_recomputed(timed, UNLIMITED).step_ns <= timed.step_ns
            assert with_fewer_recomputed(timed, Deadline(0.0)) == timed
