"""Lowered schedules against sends and receives written by hand."""

import pytest

from bapipe.errors import BapipeError, InvalidSchedule
from bapipe.runtime.lowering import lower_schedule, receives_at_step_start
from bapipe.runtime.runnable import ranks_with_stage
from bapipe.schedules.table import Schedule, parse_action


def schedule(devices: list[tuple[int, ...]], num_microbatches: int, *orders: str) -> Schedule:
    return Schedule(
        devices=tuple(devices),
        num_microbatches=num_microbatches,
        order=tuple(tuple(parse_action(text) for text in order.split()) for order in orders),
    )


def lowered(devices: list[tuple[int, ...]], num_microbatches: int, *orders: str) -> list[str]:
    return [" ".join(map(str, actions)) for actions in lower_schedule(schedule(devices, num_microbatches, *orders))]


def test_two_stages_of_one_f_one_b() -> None:
    # A receive stands where its rank has got to when the send is posted: rank 0 goes as far as it can, so it runs one
    # action per round, and rank 1's first receive comes before everything.
    assert lowered([(0,), (1,)], 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1") == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_w_sends_nothing_and_i_sends_what_b_would() -> None:
    assert lowered([(0,), (1,)], 1, "0F0 0I0 0W0", "1F0 1I0 1W0") == [
        "0F0 0SEND_F0 0RECV_B0 0I0 0W0",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0",
    ]


def test_stages_on_one_device_need_no_transfers() -> None:
    assert lowered([(0,), (0,)], 1, "0F0 1F0 1B0 0B0") == ["0F0 1F0 1B0 0B0"]


def test_each_micro_batch_goes_to_the_replica_that_runs_it() -> None:
    assert lowered([(0,), (1, 2)], 2, "0F0 0F1 0B0 0B1", "1F0 1B0", "1F1 1B1") == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0",
        "1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_receives_at_the_start_of_the_step_keep_their_order() -> None:
    actions, _ = lower_schedule(schedule([(0,), (1,)], 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    assert " ".join(map(str, receives_at_step_start(actions))) == "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1"


def test_a_deadlock_names_the_action_that_each_rank_waits_at() -> None:
    with pytest.raises(InvalidSchedule) as caught:
        lowered([(0,), (1,)], 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0")
    assert str(caught.value) == "deadlock: each waits for another: rank 0 at 0B0, rank 1 at 1F1"


def test_neighbouring_stages_share_all_devices_or_none() -> None:
    with pytest.raises(BapipeError) as caught:
        lowered([(0, 1), (1,)], 2, "0F0 0B0", "0F1 1F0 1B0 1F1 1B1 0B1")
    assert str(caught.value) == (
        "stages 0 and 1 share only some of their devices: give them the same devices in the same order, or none in common"
    )


def test_ranks_without_a_stage_get_no_process() -> None:
    assert ranks_with_stage(schedule([(2,), (0, 3)], 2, "1F0 1B0", "", "0F0 0F1 0B0 0B1", "1F1 1B1")) == (0, 2, 3)
