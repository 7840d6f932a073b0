"""A plan as tables."""

from rich.table import Table

from bapipe.formats.certificate import certify
from bapipe.planner.options import PlanOptions
from bapipe.planner.plan_step import plan_step_time
from bapipe.report.plans import memory_table, proof, render_plan
from tests.builders import chain, devices


def test_of_many_devices_without_a_stage_a_few_have_a_row() -> None:
    options = PlanOptions(minibatch_size=1, num_stages=2)
    plan = plan_step_time({"a": chain([1, 1])}, devices(4096), options)
    assert memory_table(plan).row_count == 2 + 4
    assert "4,090 more devices have no stage and hold nothing" in list(render_plan(plan))
    few = plan_step_time({"a": chain([1, 1])}, devices(6), options)
    assert memory_table(few).row_count == 6
    assert all(isinstance(part, Table) or "more devices" not in part for part in render_plan(few))


def test_a_proof_does_not_promise_more_than_is_proven() -> None:
    certificate = certify(182_445_000, 181_636_000, "some plans")
    assert f"{certificate.gap:.4%}" == "0.4454%"
    assert proof(certificate) == "within 0.45% of the lower bound, 181 ms, over some plans"
