"""Processes of one's own whose modules have other values, or whose plans differ."""

from bapipe.training.launch.processes import launch
from tests.multiprocess.unlike_ranks_cases import run


def test_tied_weights_start_equal_and_different_plans_are_refused() -> None:
    (tied, said), (other_tied, other_said) = launch(run, ["cpu0", "cpu1"], timeout_s=60)
    assert tied == other_tied
    assert (
        said
        == other_said
        == ("processes 0 and 1 of the group have different plans: give all the same, such as one file")
    )
