"""A plan as tables."""

from typing import Any

from msgspec import UNSET
from msgspec.structs import replace
from rich.table import Table

import bapipe
from bapipe.formats.certificate import BY_HAND, NOT_CERTIFIED, certify
from bapipe.formats.cluster import Bandwidth
from bapipe.planner.analysis.near_ties import near_ties
from bapipe.planner.inputs.options import PlanOptions
from bapipe.report.comparisons import render_comparison
from bapipe.report.formatting import MAX_ROWS
from bapipe.report.plan_changes import render_changes
from bapipe.report.plans import memory_table, proof, render_plan, stage_table
from bapipe.report.remarks import plan_remarks
from bapipe.report.text_gantt import gantt
from bapipe.report.variations import variations_table, worth_words
from bapipe.simulator.simulate import simulate
from tests.builders import chain, devices
from tests.step_time import plan_step_time


def test_of_many_devices_without_a_stage_a_few_have_a_row() -> None:
    options = PlanOptions(minibatch_size=1, num_stages=2)
    plan = plan_step_time({"a": chain([1, 1])}, devices(4096), options)
    assert memory_table(plan).row_count == 2 + 4
    assert "4,090 more devices have no stage and hold nothing" in list(render_plan(plan))
    few = plan_step_time({"a": chain([1, 1])}, devices(6), options)
    assert memory_table(few).row_count == 6
    assert all(isinstance(part, Table) or "more devices" not in part for part in render_plan(few))


def test_the_table_of_memory_shows_the_limit_that_was_given() -> None:
    def last_column(**limits: Any) -> tuple[object, list[object]]:
        column = memory_table(
            bapipe.plan(chain([1, 1]), devices(2, memory_bytes=10 * 2**20), minibatch_size=1, **limits)
        ).columns[-1]
        return column.header, list(column.cells)

    assert last_column() == ("has", ["10.0", "10.0"])
    assert last_column(memory_limit_bytes=5 * 2**20) == ("limit", ["5.00", "5.00"])
    assert last_column(memory_limit_bytes=20 * 2**20, memory_margin=0.1) == ("limit", ["9.00", "9.00"])


def test_a_proof_does_not_promise_more_than_is_proven() -> None:
    certificate = certify(182_445_000, 181_636_000, "some plans")
    assert f"{certificate.gap:.4%}" == "0.4454%"
    assert proof(certificate) == "within 0.45% of the lower bound, 181 ms, over some plans"


def test_the_space_of_a_bound_need_not_have_a_plan_that_was_changed() -> None:
    certificate = certify(182_445_000, 181_636_000, f"some plans{BY_HAND}")
    assert proof(certificate) == (
        f"within 0.45% of the lower bound, 181 ms, over some plans{BY_HAND}; the plan itself need not be in that space"
    )


def test_numbers_of_other_cuts_are_in_the_right_number_when_they_are_shown() -> None:
    """The texts of plan files, which stay as they are, say `1 other cuts` and `0 other cuts`."""
    space = "every order; orders were searched for {} other cuts too"
    shown = {num: proof(certify(5, 5, space.format(num))) for num in (0, 1, 2, 10, 11)}
    assert shown[0] == "proven optimal over every order"
    assert shown[1].endswith("; orders were searched for 1 other cut too")
    assert all(shown[num].endswith(f"; orders were searched for {num} other cuts too") for num in (2, 10, 11))


def test_a_step_that_takes_no_time_has_an_unlimited_rate() -> None:
    """In a profile without times, which nothing divides by."""
    profiles = {"a": chain([0, 0])}
    plan = plan_step_time(profiles, devices(2), PlanOptions(minibatch_size=4))
    slow = plan_step_time({"a": chain([1, 1])}, devices(2), PlanOptions(minibatch_size=4))
    first, *_, alternatives = render_plan(plan)
    assert "0 ms per step, unlimited samples/s" in str(first)
    assert isinstance(alternatives, Table)
    assert {*alternatives.columns[2].cells} == {"unlimited"}
    assert "unlimited samples/s" in plan._repr_html_()
    _, compared, *_ = render_comparison({"1f1b": plan}, slow.alternatives, {})
    assert isinstance(compared, Table)
    assert next(iter(compared.columns[3].cells)) == "unlimited"
    assert any("-> unlimited" in line for line in render_changes(slow, plan))
    ties = near_ties(plan, profiles, PlanOptions(minibatch_size=plan.minibatch_size))
    assert all("as fast" in words for words in plan_remarks(plan, profiles, ["1f1b"], ties) if "near-tie" in words)
    figures = {"peak_bytes": 0, "gap": 0.0, "plan": "1", "microbatch_size": 1, "is_new_kind": False}
    rows = [{"link": n, "step_ns": 0, "samples_per_s": 0.0, **figures} for n in (1, 2)]
    assert "unlimited" in [*variations_table(["link"], rows).columns[3].cells]
    assert worth_words(["link"], rows) == ["no other value is worth more than 0.5 %, by itself"]


def test_plans_for_other_inputs_differ_in_these() -> None:
    profile = chain([1, 1])
    plan = bapipe.make(profile, devices(2), minibatch_size=4)
    slow = replace(devices(2), intra_host=Bandwidth(bytes_per_s=1000, latency_ns=0))
    assert list(render_changes(plan, bapipe.make(profile, slow, minibatch_size=4)))[:-1] == ["another cluster"]
    renamed = bapipe.make(replace(profile, model="other"), devices(2), minibatch_size=4)
    changes = ["model: chain -> other", "another profile of a"]
    assert list(render_changes(plan, renamed))[:-1] == changes
    load = replace(plan, objective="throughput", certificate=NOT_CERTIFIED)
    assert list(render_changes(plan, load))[:-1] == ["objective: step -> throughput"]


def test_a_plan_that_is_not_judged_has_no_figures_to_compare() -> None:
    plan = bapipe.make(chain([1, 1]), devices(2), minibatch_size=4)  # (4 + 1) 3 ms
    first, second = plan.cluster.devices
    by_hand = replace(plan, cluster=replace(plan.cluster, devices=(first, replace(second, speed=2.0))))
    assert not by_hand.is_judged
    assert list(render_changes(plan, by_hand))[:2] == ["step: 15.0 ms -> not simulated", "another cluster"]
    assert next(render_changes(by_hand, plan)) == "step: not simulated -> 15.0 ms"
    assert list(render_changes(by_hand, by_hand)) == ["no difference"]


def test_only_another_order_of_the_same_actions_counts_as_a_change_of_order() -> None:
    profile, cluster = chain([1, 2, 3]), devices(3)
    plan = bapipe.make(profile, cluster, minibatch_size=4, microbatch_size=1, num_stages=2)
    line = "the order of the actions"
    swapped = bapipe.edit(plan, profile, swap=("d0", "d1"))
    assert line not in render_changes(plan, swapped)
    assert "stage 0: on d0 -> on d1" in render_changes(plan, swapped)
    assert line not in render_changes(plan, bapipe.edit(plan, profile, place=["stage 1 on d2"]))
    assert line not in render_changes(plan, bapipe.edit(plan, profile, place=["stage 1 on d1,d2"]))
    other = bapipe.edit(plan, profile, schedule="gpipe")
    assert line in render_changes(plan, replace(other, schedule=plan.schedule))


def test_of_very_many_stages_and_devices_some_rows_are_left_out() -> None:
    """A hundred stages, each on two devices: the first and the last ones have rows, and what is left out is said."""
    profile = chain([1] * 100)
    cuts = [layer.name for layer in profile.layers[1:]]
    placed = [(f"d{2 * stage}", f"d{2 * stage + 1}") for stage in range(100)]
    plan = bapipe.make(profile, devices(200), minibatch_size=4, schedule="1f1b", cuts=cuts, devices=placed)
    timeline = simulate(plan, {"a": profile})
    for table in (stage_table(plan), memory_table(plan, timeline)):
        assert table.row_count == MAX_ROWS + 1
        cells = [list(column.cells) for column in table.columns]
        assert [column[32] for column in cells[:2]] == ["…", "152 more"]
    names = [line.split()[0] for line in gantt(timeline, 80).splitlines()[:-1]]
    assert names == [*(f"d{i}" for i in range(32)), "…", *(f"d{i}" for i in range(184, 200))]


def test_large_figures_of_a_notebook_are_written_out() -> None:
    plan = bapipe.make(chain([4115]), devices(1), minibatch_size=1, microbatch_size=1)  # 3 * 4.115 s
    prediction = replace(plan.prediction, samples_per_s=11010.4)
    html = replace(plan, prediction=prediction, certificate=replace(plan.certificate, digest=UNSET))._repr_html_()
    assert "12,345 ms per step, 11,010 samples/s" in html
