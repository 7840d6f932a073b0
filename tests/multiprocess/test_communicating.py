"""Models whose forwards wait for other processes are refused before they wait."""

import pytest

from bapipe.errors import RunFailed
from bapipe.training.launch.processes import launch
from tests.multiprocess.communicating_cases import refusal, refusal_of_a_step


def test_a_forward_that_communicates_is_refused_in_all_processes() -> None:
    first, second = launch(refusal, ["cpu0", "cpu1"], timeout_s=20)
    assert first == second
    assert first.startswith("the forward of layer '1' communicates with other processes (allreduce)")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_later_forward_or_a_backward_that_communicates_ends_the_step(where: str) -> None:
    with pytest.raises(RunFailed) as caught:
        launch(refusal_of_a_step, ["cpu0", "cpu1"], where, timeout_s=20)
    assert f"the {where} of a layer in stage 0 communicates with processes that do not run it" in str(caught.value)
