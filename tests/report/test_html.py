"""A plan as a page, and timelines read back from traces."""

import xml.etree.ElementTree as ET
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.planner.plan import plan
from bapipe.report import encode_trace
from bapipe.report.chrome_trace import read_trace
from bapipe.report.html import plan_page
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline
from tests.random_profiles import random_cluster, random_profile


def planned(schedule: str, *, side_by_side: bool = False) -> tuple[Plan, Timeline]:
    random = Random(3)
    profile, cluster = random_profile(random, 8), random_cluster(random, 2)
    devices = tuple(replace(d, memory_bytes=10**12, overlaps_transfers=True) for d in cluster.devices)
    found = plan(profile, replace(cluster, devices=devices), minibatch_size=12, schedules=[schedule], microbatch_size=3)
    devices = tuple(replace(d, side_by_side=side_by_side) for d in devices)
    found = replace(found, cluster=replace(found.cluster, devices=devices))
    return found, simulate(found, {"a": profile})


@pytest.mark.parametrize(("schedule", "side_by_side"), [("zb-v", False), ("fbp-as", True)])
def test_a_written_trace_is_read_back(tmp_path: Path, schedule: str, side_by_side: bool) -> None:
    _, timeline = planned(schedule, side_by_side=side_by_side)
    path = tmp_path / "trace.json"
    path.write_bytes(encode_trace([("predicted", timeline), ("again", timeline)]))
    (title, found), (other, _) = read_trace(path)
    assert (title, other) == ("predicted", "again")
    assert found.devices == timeline.devices
    assert found.spans == timeline.spans
    assert sorted(found.transfers) == sorted(timeline.transfers)
    assert found.updates == timeline.updates
    assert found.memory_over_time == timeline.memory_over_time
    assert [memory.total for memory in found.memory] == [memory.total for memory in timeline.memory]


@pytest.mark.parametrize(("schedule", "side_by_side"), [("zb-v", False), ("fbp-as", True)])
def test_a_page_draws_every_action_and_loads_nothing(schedule: str, side_by_side: bool) -> None:
    found, timeline = planned(schedule, side_by_side=side_by_side)
    text = plan_page(found, [("predicted", timeline)]).decode()
    assert not any(word in text for word in ("http", "src=", "@import", "url("))
    body = text[text.index("<body>") : text.index("</body>")] + "</body>"
    pictures = list(ET.fromstring(body).iter("svg"))
    assert len(pictures) == 2
    titles = [str(title.text) for title in pictures[0].iter("title")]
    drawn = [title.split(",")[0] for title in titles if title[0].isdigit()]
    sent = [f"{t.stage}{t.phase}{t.microbatch}" for t in timeline.transfers]
    assert sorted(drawn) == sorted([*(str(span.action) for span in timeline.spans), *sent])
    assert sum(title.startswith("update") for title in titles) == len(timeline.updates)
    ranks = {span.rank for span in timeline.spans}
    assert len(list(pictures[1].iter("polygon"))) == 3 * len(ranks)


def test_errors_of_a_trace_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(BapipeError, match=r"x\.json: no such file$"):
        read_trace(path)
    path.write_text('{"traceEvents": [{"ph": "X"}]}')
    with pytest.raises(BapipeError, match=r"x\.json is not a trace of bapipe \(.*name.*\): write one with `trace`$"):
        read_trace(path)
