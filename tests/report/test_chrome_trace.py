"""Threads of a trace, by hand."""

from pathlib import Path

import msgspec

from bapipe.formats.plan import Memory
from bapipe.report.chrome_trace import encode_trace, read_trace
from bapipe.schedules.table import Phase, parse_action
from bapipe.simulator.timeline import Span, Sync, Timeline, Transfer, Update

MEMORY = Memory(params=1, gradients=2, optimizer=3, stash=4, workspace=5, buffers=6)

TIMELINE = Timeline(
    devices=("a", "b"),
    spans=(
        Span(0, parse_action("0F0"), 0, 4000),
        Span(1, parse_action("1F0"), 5000, 9000),
        Span(1, parse_action("1B0"), 6000, 8000),
    ),
    transfers=(Transfer(0, 1, 0, Phase.FORWARD, 0, 4000, 5000),),
    syncs=(Sync(1, 0, 0, 9000, 9500),),
    updates=(Update(1, 1, 9500, 10_000),),
    memory=(MEMORY, MEMORY),
    usage=(((4, 5),), ((4, 5), (3, 5))),
)


def test_each_kind_of_event_has_its_thread() -> None:
    events = msgspec.json.decode(encode_trace([("one", TIMELINE)]))["traceEvents"]
    threads = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert threads == {
        "0F0": 0, "1F0": 2, "1B0": 10_001, "update 1": 2, "0F0 to b": 1, "all-reduce": 5,
    }  # fmt: skip
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "a", 1: "a sends", 2: "b", 3: "b sends", 10_001: "b backwards"}


def test_a_trace_read_back_is_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(encode_trace([("one", TIMELINE)]))
    assert read_trace(path) == [("one", TIMELINE)]
