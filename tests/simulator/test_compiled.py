"""The compiled form of a schedule agrees with `dependencies`, the rule that it compiles."""

import pytest

from bapipe.schedules import LOOPED, SCHEDULES
from bapipe.schedules.placement import permute_ranks
from bapipe.schedules.table import Action, Schedule, dependencies
from bapipe.simulator.compiled import NUM_SPECIAL_MESSAGES, CompiledSchedule, compile_schedule, permute_compiled

ALL = {**SCHEDULES, **LOOPED}


def needed_actions(action: Action, schedule: Schedule) -> list[Action]:
    """The actions of the schedule that `action` depends on."""
    present = {action for rank in schedule.order for action in rank}
    return [needed for group in dependencies(action, schedule.num_stages) for needed in group if needed in present]


def check_compiled(compiled: CompiledSchedule, schedule: Schedule) -> None:
    index_of = {action: i for i, action in enumerate(compiled.actions)}
    producer = {message: i for i, message in enumerate(compiled.produces)}
    available = compiled.num_messages - NUM_SPECIAL_MESSAGES
    assert len(index_of) == len(compiled.actions)
    for action, i in index_of.items():
        needed = needed_actions(action, schedule)
        assert len(needed) == len(dependencies(action, schedule.num_stages))
        assert all(index_of[other] < i for other in needed)
        # The last dependency is the one of another stage; the last stage's backward has only its own F.
        consumed = compiled.consumes[i]
        if str(action.phase) == "W" or not needed:
            assert consumed == available
        else:
            assert compiled.actions[producer[consumed]] == needed[-1]
        # What crosses no stage is in the order of the lane, or ends before what the action consumes.
        for other in needed[:-1]:
            assert other.stage == action.stage
        channel = compiled.channel_of[i]
        if channel >= 0:
            assert compiled.channels[channel].source == compiled.ranks[i]


@pytest.mark.parametrize("name", ALL)
def test_an_action_consumes_what_its_dependency_produces(name: str) -> None:
    schedule = ALL[name](4, 5)
    check_compiled(compile_schedule(schedule), schedule)


def test_two_lanes_have_the_same_dependencies() -> None:
    schedule = SCHEDULES["fbp-as"](3, 4)
    check_compiled(compile_schedule(schedule, (0, 1, 2)), schedule)


def test_a_permuted_compiled_schedule_is_that_of_the_permuted_schedule() -> None:
    """Up to the order in which it lists actions: each action has the same rank, and each channel the same ends."""
    for name in ("1f1b", "gpipe", "zb-h1"):
        table = SCHEDULES[name](3, 4)
        permuted = permute_compiled(compile_schedule(table), [3, 0, 2], 4)
        direct = compile_schedule(permute_ranks(table, [3, 0, 2], 4))
        assert dict(zip(permuted.actions, permuted.ranks, strict=True)) == dict(
            zip(direct.actions, direct.ranks, strict=True)
        )
        assert set(permuted.channels) == set(direct.channels)
        assert permuted.num_ranks == direct.num_ranks
