"""Text charts and tables, compared with checked ones."""

import json

import pytest

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.report import encode_trace, gantt, mib, ms, number
from bapipe.schedules.one_f_one_b import one_f_one_b
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage import Stage, StageCost
from bapipe.simulator.timeline import Timeline


@pytest.fixture
def timeline() -> Timeline:
    """1F1B on two equal stages: F 2 ms, B 4 ms, 1 ms of update, no transfer time."""
    link = Bandwidth(bytes_per_s=10**9, latency_ns=0)
    devices = tuple(Device(name=f"gpu{i}", host="h", kind="a", memory_bytes=0) for i in range(2))
    ns = 10**6
    cost = StageCost(forward_ns=2 * ns, input_grad_ns=2 * ns, weight_grad_ns=2 * ns, update_ns=ns)
    cluster = Cluster(devices=devices, intra_host=link, inter_host=link)
    return simulate_schedule(one_f_one_b(2, 3), [Stage(costs=(cost,))] * 2, cluster)


def test_gantt_is_to_scale(timeline: Timeline) -> None:
    """25 ms in 50 columns: two columns a millisecond; the last update starts at 24 ms."""
    assert gantt(timeline, 55).splitlines() == [
        "gpu0 0░░░1░░░        0▓▓▓▓▓▓▓2░░░1▓▓▓▓▓▓▓    2▓▓▓▓▓▓▓uu",
        "gpu1     0░░░0▓▓▓▓▓▓▓1░░░1▓▓▓▓▓▓▓2░░░2▓▓▓▓▓▓▓uu",
        "     ░ forward  ▓ backward  u update  (0 to 25.0 ms)",
    ]


def test_a_trace_holds_every_action_in_microseconds(timeline: Timeline) -> None:
    events = [e for e in json.loads(encode_trace([("predicted", timeline)]))["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(timeline.spans) + len(timeline.updates)
    first = next(e for e in events if e["name"] == "1B0")
    assert (first["ts"], first["dur"], first["pid"], first["tid"]) == (4000.0, 4000.0, 0, 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (100.4, "100"),
        (99.94, "99.9"),
        (1.005, "1.00"),
        (0.1234, "0.123"),
        (0.0864, "0.086"),
        (0.00001, "0.000"),
    ],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_units() -> None:
    assert ms(2_989_000_000) == "2,989 ms"
    assert mib(3 * 2**19) == "1.50 MiB"
