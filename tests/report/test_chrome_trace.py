"""Threads of a trace, by hand."""

from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.formats.prediction import Memory
from bapipe.planner.plan import plan
from bapipe.report.chrome_trace import encode_trace, read_trace
from bapipe.schedules.table import Phase, parse_action
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Span, Sync, Timeline, Transfer, Update
from tests.random_profiles import random_cluster, random_profile

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


def slice_on(thread: int, name: str, **changes: object) -> dict[str, object]:
    return {"ph": "X", "name": name, "pid": 0, "tid": thread, "ts": 0.0, "dur": 1.0} | changes


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (slice_on(0, "0F0", ts=1e308), "Expected `float` <= 4611686018427388.0"),
        (slice_on(0, "0F0", dur=-1e300), "Expected `float` >= -4611686018427388.0"),
        ({"ph": "X"}, "Object missing required field 'name'"),
        (slice_on(77, "0F0"), "'0F0' is on thread 77, which is no device's"),
        (slice_on(0, "update x"), "'update x' is no action"),
        (slice_on(1, "0F0 to nobody"), "the transfer '0F0 to nobody' of thread 1 joins no two devices"),
        (slice_on(2, "0F0 to b"), "the transfer '0F0 to b' of thread 2 joins no two devices"),
        (slice_on(0, "0F9"), "not one value of memory for each action"),
        ({"ph": "M", "name": "thread_name", "pid": 0, "tid": 9}, "a thread_name without a name"),
        ({"ph": "M", "name": "thread_name", "pid": 1, "args": {"name": "x"}}, "a process without a name or without devices"),
        ({"ph": "C", "name": "memory a", "pid": 0, "args": {"params": -1}}, "Expected `int` >= 0 - at `$.params`"),
    ],
)  # fmt: skip
def test_a_trace_of_something_else_is_refused(event: dict[str, object], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tree = msgspec.json.decode(encode_trace([("one", TIMELINE)]))
    tree["traceEvents"].append(event)
    path.write_bytes(msgspec.json.encode(tree))
    with pytest.raises(BapipeError) as caught:
        read_trace(path)
    assert f"{path} is not a trace of bapipe ({reason}" in str(caught.value)
    assert str(caught.value).endswith("): write one with `trace`")


def test_devices_are_told_apart_by_their_threads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = replace(TIMELINE, devices=("a", "a sends"))
    path.write_bytes(encode_trace([("one", timeline)]))
    assert read_trace(path) == [("one", timeline)]


def planned(schedule: str, *, side_by_side: bool = False) -> tuple[Plan, Timeline]:
    random = Random(3)
    profile, cluster = random_profile(random, 8), random_cluster(random, 2)
    devices = tuple(msgspec.structs.replace(d, memory_bytes=10**12, overlaps_transfers=True) for d in cluster.devices)
    found = plan(
        profile,
        msgspec.structs.replace(cluster, devices=devices),
        minibatch_size=12,
        schedules=[schedule],
        microbatch_size=3,
    )
    devices = tuple(msgspec.structs.replace(d, side_by_side=side_by_side) for d in devices)
    found = msgspec.structs.replace(found, cluster=msgspec.structs.replace(found.cluster, devices=devices))
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


def test_errors_of_a_trace_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(BapipeError, match=r"x\.json: no such file$"):
        read_trace(path)
    path.write_text('{"traceEvents": [{"ph": "X"}]}')
    with pytest.raises(BapipeError, match=r"x\.json is not a trace of bapipe \(.*name.*\): write one with `trace`$"):
        read_trace(path)
