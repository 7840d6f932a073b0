"""Placing schedules on devices: hand cases."""

from bapipe.schedules import SCHEDULES
from bapipe.schedules.placement import distribute_replicas, merge_stages, permute_ranks
from bapipe.schedules.table import Schedule, check


def lines(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.order]


def test_merged_stages_follow_the_order_of_their_first_device() -> None:
    """1F1B of three stages as two: the first has devices 0 and 1, which take micro-batches 0, 2 and 1, 3."""
    merged = merge_stages(SCHEDULES["1f1b"](3, 4), [(0, 1), (2,)], 3)
    check(merged)
    assert merged.devices == ((0, 1), (2,))
    assert lines(merged) == [
        "0F0 0F2 0B0 0B2",
        "0F1 0F3 0B1 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]


def test_replicas_take_micro_batches_round_robin() -> None:
    """1F1B of two stages, the first on devices 2 and 0; device 3 has nothing to do."""
    placed = distribute_replicas(SCHEDULES["1f1b"](2, 4), ((2, 0), (1,)), 4)
    check(placed)
    assert lines(placed) == [
        "0F1 0B1 0F3 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
        "0F0 0B0 0F2 0B2",
        "",
    ]


def test_ranks_are_permuted() -> None:
    placed = permute_ranks(SCHEDULES["gpipe"](2, 1), [2, 0], 3)
    assert placed.devices == ((2,), (0,))
    assert lines(placed) == ["1F0 1B0", "", "0F0 0B0"]
