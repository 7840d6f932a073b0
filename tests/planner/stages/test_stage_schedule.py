"""What an order of actions demands of one stage: closed forms of 1F1B and GPipe, and brute force for every schedule."""

import pytest

from bapipe.planner.stages.stage_schedule import (
    ReplicaLoad,
    StageSchedule,
    runs_forwards_first,
    stage_schedule_of,
)
from bapipe.schedules import SCHEDULES
from bapipe.schedules.table import Action, Phase
from bapipe.simulator.in_flight import InFlight


@pytest.mark.parametrize("stage", range(4))
def test_1f1b_has_a_micro_batch_in_flight_per_later_stage(stage: int) -> None:
    schedule = stage_schedule_of(SCHEDULES["1f1b"](4, 8).order[stage], 1)
    in_flight = 4 - stage
    assert (schedule.max_in_flight, schedule.forwards_ahead) == (in_flight, in_flight - 1)
    assert schedule.replicas == (ReplicaLoad(num_microbatches=8, memory_peaks=(InFlight(in_flight, 1, 0),)),)


def test_gpipe_has_all_micro_batches_in_flight() -> None:
    schedule = stage_schedule_of(SCHEDULES["gpipe"](3, 8).order[0], 2)
    assert schedule.max_in_flight == 8
    assert [replica.num_microbatches for replica in schedule.replicas] == [4, 4]
    assert schedule.replicas[0].memory_peaks == ((4, 1, 0),)


def test_only_gpipe_and_its_two_stage_backward_run_forwards_first() -> None:
    tables = {name: schedule(2, 16) for name, schedule in SCHEDULES.items()}
    assert {name for name, table in tables.items() if all(map(runs_forwards_first, table.order))} == {
        "gpipe",
        "gpipe-2bp",
    }


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_definitions_hold_for_every_schedule(name: str, num_replicas: int) -> None:
    for order in SCHEDULES[name](4, 11).order:
        check_definitions(order, stage_schedule_of(order, num_replicas), num_replicas)


def check_definitions(order: tuple[Action, ...], schedule: StageSchedule, num_replicas: int) -> None:
    at = {(action.phase, action.microbatch): i for i, action in enumerate(order)}

    def backward(m: int) -> int:
        return at[Phase.BACKWARD, m] if (Phase.BACKWARD, m) in at else at[Phase.INPUT_GRAD, m]

    d, a = schedule.max_in_flight, schedule.forwards_ahead
    assert d % num_replicas == a % num_replicas == 0
    for m in range(11):
        if m + d < 11:
            assert at[Phase.FORWARD, m + d] > backward(m)
        if m + a < 11:
            assert at[Phase.FORWARD, m + a] < backward(m)
    assert schedule.num_microbatches == 11
    assert schedule.has_split_backward == any(action.phase is Phase.INPUT_GRAD for action in order)
    assert schedule.has_full_backward == any(action.phase is Phase.BACKWARD for action in order)
