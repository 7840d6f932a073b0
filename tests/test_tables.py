"""Profiles, plans, timelines and comparisons as tables of a notebook and of pandas."""

import sys
from functools import cache
from typing import Any

import msgspec
import pytest

import bapipe
from bapipe.errors import BapipeError
from bapipe.planner.compare import Comparison
from bapipe.schedules import SCHEDULES
from bapipe.tables import MAX_ROWS, data_frame, rows_html
from tests.builders import chain, devices

HOSTILE = "<script>alert(1)</script>\x1b[31m"


@cache
def shown() -> dict[str, Any]:
    """One of each type whose names hold markup and terminal escapes."""
    profile = msgspec.structs.replace(
        chain([1, 2, 1]),
        model=HOSTILE,
        layers=tuple(
            msgspec.structs.replace(layer, name=f"{layer.name}{HOSTILE}") for layer in chain([1, 2, 1]).layers
        ),
    )
    plan = bapipe.plan(profile, devices(2), minibatch_size=4, num_stages=2)
    compared = Comparison(plans={HOSTILE: plan}, others=plan.alternatives, failed={"zb-v": HOSTILE})
    return {"profile": profile, "plan": plan, "timeline": bapipe.simulate(plan, profile), "comparison": compared}


@pytest.mark.parametrize("name", ["profile", "plan", "timeline", "comparison"])
def test_a_notebook_shows_names_as_text(name: str) -> None:
    html = shown()[name]._repr_html_()
    assert "<table>" in html
    assert "<script>" not in html
    assert "\x1b" not in html
    assert name == "timeline" or "&lt;script&gt;" in html


@pytest.mark.parametrize("name", ["profile", "plan", "timeline", "comparison"])
def test_frames_have_the_rows(name: str) -> None:
    pytest.importorskip("pandas")
    value = shown()[name]
    frame = value.to_pandas()
    assert len(frame) == len(value.rows()) > 2 - (name == "plan")
    assert set(frame.columns) == {column for row in value.rows() for column in row}


def test_schedules_are_compared_from_python() -> None:
    profile = chain([1, 2, 1])
    compared = bapipe.compare(profile, 2, minibatch_size=4, schedules=["gpipe", "1f1b"])
    assert {"gpipe", "1f1b"} <= set(compared.plans)
    fastest = bapipe.plan(profile, 2, minibatch_size=4, schedules=["gpipe", "1f1b"])
    assert compared.rows()[0]["step_ns"] == fastest.prediction.step_ns
    none = bapipe.compare(
        profile, 2, minibatch_size=4, schedules=[]
    )  # as of `bapipe.plan`: all with one stage a device
    assert set(none.plans) | set(none.failed) == set(SCHEDULES)


def test_rows_hold_the_figures() -> None:
    values = shown()
    assert sum(row["forward_ns"] for row in values["profile"].rows()) == 4_000_000
    assert max(row["end_ns"] for row in values["timeline"].rows()) == values["timeline"].step_ns
    assert [row["device"] for row in values["plan"].rows()] == [d for s in values["plan"].stages for d in s.devices]
    assert values["comparison"].rows()[-1] == {"strategy": "zb-v", "note": HOSTILE}


def test_a_plan_that_was_not_judged_has_rows_without_times() -> None:
    bare = msgspec.structs.replace(shown()["plan"], minibatch_size=8, num_microbatches=8, order=())
    assert not bare.is_judged
    assert "busy_ns" not in bare.rows()[0]
    assert "<table>" in bare._repr_html_()


def test_a_profile_is_a_graph_of_networkx() -> None:
    profile = shown()["profile"]
    assert list(profile.to_networkx().nodes) == [layer.name for layer in profile.layers]
    assert len(profile.to_networkx().edges) == 2


def test_long_tables_lose_their_end_and_units_are_readable() -> None:
    html = rows_html(["a & b"], [{"time_ns": 1_500_000, "size_bytes": 2**20, "name": "x"}] * (MAX_ROWS + 3))
    assert "<div>a &amp; b</div>" in html
    assert '<th scope="col">time (ms)</th><th scope="col">size (MiB)</th><th scope="col">name</th>' in html
    assert html.count("1.500") == MAX_ROWS
    assert "and 3 more rows" in html


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(BapipeError, match="pip install pandas"):
        data_frame([])
