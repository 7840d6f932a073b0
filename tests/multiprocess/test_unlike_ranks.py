"""Processes of one's own whose modules have other values or another forward, or whose plans differ."""

from bapipe.training.launch.processes import launch
from tests.multiprocess.unlike_ranks_cases import run


def test_tied_weights_start_equal_and_different_plans_and_models_are_refused() -> None:
    (tied, said), (other_tied, other_said) = launch(run, ["cpu0", "cpu1"], timeout_s=60)
    assert tied == other_tied
    assert said == other_said
    assert said[0] == (
        "processes 0 and 1 of the group have different plans: give all of them the same plan, such as one file"
    )
    assert said[1].startswith(
        "process 1 has another version of the model (Tied) than process 0, so they would not train"
    )
