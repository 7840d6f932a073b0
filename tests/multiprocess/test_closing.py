"""A pipeline that is closed leaves no connections, threads or process groups."""

import pytest

from bapipe.training.launch.processes import launch
from tests.multiprocess.closing_cases import (
    NUM_PIPELINES,
    failing_pipelines,
    left_by_another,
    many_pipelines,
    replicas_on_some,
)

counted = pytest.mark.skipif(
    "not __import__('os').path.isdir('/proc/self/fd')", reason="counts what Linux says is open"
)


@counted
def test_pipelines_that_are_closed_leave_nothing() -> None:
    for counts, num_groups, said, names in launch(many_pipelines, ["cpu0", "cpu1"], timeout_s=60):
        assert counts == [counts[0]] * NUM_PIPELINES
        assert num_groups == 1  # that of the job
        assert said.startswith("this pipeline is closed")
        assert "second.bias" in names


@counted
def test_pipelines_that_cannot_be_made_leave_nothing() -> None:
    for counts, num_groups, said in launch(failing_pipelines, ["cpu0", "cpu1"], timeout_s=60):
        assert counts == [counts[0]] * NUM_PIPELINES
        assert num_groups == 1
        assert {text.partition(":")[0] for text in said} == {"`optimizer` returned None", "while stages are connected"}


def test_all_processes_close_together_where_only_some_have_replicas() -> None:
    assert launch(replicas_on_some, ["cpu0", "cpu1", "cpu2"], timeout_s=60) == [[3.0, 3.0]] * 3


def test_a_lost_rank_is_no_fault_of_a_layer() -> None:
    (kind, said), _ = launch(left_by_another, ["cpu0", "cpu1"], timeout_s=60)
    assert kind == "RunFailed"
    assert said.startswith("process 1 has ended, as where it was killed or its own code failed, or the link to it is")
