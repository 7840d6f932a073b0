"""Legal tables, and the complete message for each illegal one."""

import pytest

from bapipe.errors import InvalidSchedule
from bapipe.schedules import SCHEDULES
from bapipe.schedules.gpipe import gpipe
from bapipe.schedules.one_f_one_b import one_f_one_b
from bapipe.schedules.table import Action, Phase, Schedule, check, dependencies, is_ready, parse_action, parse_actions


def table(*ranks: str, devices: tuple[tuple[int, ...], ...] = ((0,), (1,)), num_microbatches: int = 1) -> Schedule:
    order = tuple(tuple(parse_action(text) for text in rank.split()) for rank in ranks)
    return Schedule(devices=devices, num_microbatches=num_microbatches, order=order)


def test_gpipe_runs_all_forwards_first() -> None:
    assert gpipe(2, 3) == table("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2", num_microbatches=3)


def test_1f1b_as_in_the_paper() -> None:
    """Narayanan et al. 2021, fig. 4 (top), with 4 stages and 4 of its 8 micro-batches: warm-up of 3, 2, 1, 0."""
    assert [" ".join(map(str, rank)) for rank in one_f_one_b(4, 4).order] == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
    ]


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        ("0F1", []),
        ("2F1", ["1F1"]),
        ("1B3", ["1F3", "2B3|2I3"]),
        ("1I3", ["1F3", "2B3|2I3"]),
        ("2B0", ["2F0"]),
        ("1W2", ["1I2"]),
    ],
)
def test_dependencies_of_actions(action: str, needed: list[str]) -> None:
    groups = dependencies(parse_action(action), 3)
    assert ["|".join(map(str, group)) for group in groups] == needed


def test_an_action_is_ready_when_one_of_each_group_has_ended() -> None:
    backward = parse_action("0B0")
    assert not is_ready(backward, 2, {parse_action("0F0")})
    assert not is_ready(backward, 2, {parse_action("1I0")})
    assert is_ready(backward, 2, {parse_action("0F0"), parse_action("1I0")})


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_microbatches", range(1, 9))
def test_every_schedule_is_complete(name: str, num_stages: int, num_microbatches: int) -> None:
    check(SCHEDULES[name](num_stages, num_microbatches))


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X0", "-1F0", "00F0", "0F0 ", "0f0", "0F1.5", "0F99999999999"])
def test_malformed_actions_are_refused(text: str) -> None:
    with pytest.raises(InvalidSchedule):
        parse_action(text)


def test_an_action_reads_as_it_prints() -> None:
    assert parse_action("12W7") == Action(12, Phase.WEIGHT_GRAD, 7)
    assert str(Action(12, Phase.WEIGHT_GRAD, 7)) == "12W7"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("0F0 0B0", "1F0"), "stage 1, micro-batch 0: has 1F0; want F and B, or F, I and W"),
        (("0F0 0B0", ""), "stage 1, micro-batch 0: has nothing; want F and B, or F, I and W"),
        (("0F0 0I0", "1F0 1B0"), "stage 0, micro-batch 0: has 0F0, 0I0; want F and B, or F, I and W"),
        (("0F0 0W0", "1F0 1B0"), "rank 0, action 1: 0W0 comes before its I"),
        (("0F0 0B0 0I0 0W0", "1F0 1B0"), "stage 0, micro-batch 0: has 0F0, 0B0, 0I0, 0W0; want F and B, or F, I and W"),
        (("0F0 0F0 0B0", "1F0 1B0"), "rank 0, action 1: 0F0 comes a second time"),
        (("0B0 0F0", "1F0 1B0"), "rank 0, action 0: 0B0 comes before its F"),
        (("0F0 0W0 0I0", "1F0 1B0"), "rank 0, action 1: 0W0 comes before its I"),
        (("0F0 0B0 1F0 1B0", ""), "rank 0, action 2: 1F0 belongs on rank 1"),
        (("0F0 0B0 2F0", "1F0 1B0"), "rank 0, action 2: 2F0 names stage 2; there are 2 stages"),
        (("0F0 0B0 0F1", "1F0 1B0"), "rank 0, action 2: 0F1 names micro-batch 1; there are 1 micro-batches"),
    ],
)
def test_a_table_that_is_not_legal(ranks: tuple[str, str], message: str) -> None:
    with pytest.raises(InvalidSchedule) as caught:
        check(table(*ranks))
    assert str(caught.value) == message


def test_the_last_stage_runs_forwards_in_order() -> None:
    orders = "0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"
    with pytest.raises(
        InvalidSchedule, match=r"the last stage must run F in ascending micro-batch order, not \[1, 0\]"
    ):
        check(table(*orders, num_microbatches=2))


@pytest.mark.parametrize("texts", [[], ["0F0"], ["12W7", "0B0", "3I21"]])
def test_actions_are_parsed_together_as_one_by_one(texts: list[str]) -> None:
    assert parse_actions(texts) == tuple(map(parse_action, texts))


@pytest.mark.parametrize(
    "texts", [[""], ["0F0", "0X0"], ["0F0\n0F1", ""], ["0F0\n"], ["0F0\n0F1", "x"], ["00F0"], ["0F٣"]]
)
def test_texts_of_which_one_is_no_action_are_not_parsed_together(texts: list[str]) -> None:
    assert parse_actions(texts) is None
