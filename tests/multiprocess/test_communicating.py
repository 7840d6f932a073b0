"""Models whose forwards wait for other processes are refused before they wait."""

from bapipe.training.launch.processes import launch
from tests.multiprocess.communicating_cases import refusal


def test_a_forward_that_communicates_is_refused_in_all_processes() -> None:
    first, second = launch(refusal, ["cpu0", "cpu1"], timeout_s=20)
    assert first == second
    assert first.startswith("the forward of layer '1' communicates with other processes (allreduce)")
