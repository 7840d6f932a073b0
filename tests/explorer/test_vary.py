"""The best plan at each point of a grid."""

import csv
import json
import os
import signal
from io import StringIO
from random import Random
from typing import Any

import msgspec
import pytest

import bapipe
from bapipe.cli.vary import _write_cells, parse_axis, show_points
from bapipe.errors import BapipeError
from bapipe.explorer import sweep_processes
from bapipe.explorer import vary as sweep
from bapipe.explorer.session import Session
from bapipe.explorer.sweep_processes import plan_chains
from bapipe.explorer.vary import Axis, SweepInterrupted, neighbours, vary
from bapipe.formats.cache import cache_folder
from bapipe.formats.measurement import Measurement
from bapipe.formats.profile import HALVED, ModelProfile
from bapipe.planner import nearby
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.nearby import Point
from bapipe.processes import blocked
from bapipe.report import variations_table, worth_words
from bapipe.report.remarks import SCALED
from tests.builders import chain, devices
from tests.random_profiles import random_profile

PROFILE = chain([1, 2, 3, 4], param_bytes=100, stash_bytes=10, output_bytes=1000)
CLUSTER = devices(2, bytes_per_s=10**6)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_every_point_has_the_best_plan_of_its_cluster() -> None:
    session = Session({"a": PROFILE}, CLUSTER, 8)
    axes = [Axis(name="devices", values=(1, 2)), Axis(name="link", values=(0.5, 2.0))]
    points = vary(session, axes, ["1f1b"], lambda done, total: None, exact=True)
    assert [point.values for point in points] == [{"devices": d, "link": link} for d in (1, 2) for link in (0.5, 2.0)]
    assert [point.is_new_kind for point in points][:2] == [False, False]  # none is before the first one
    for point in points:
        link = msgspec.structs.replace(CLUSTER.intra_host, bytes_per_s=round(10**6 * point.values["link"]))
        cluster = msgspec.structs.replace(
            CLUSTER, devices=CLUSTER.devices[: int(point.values["devices"])], intra_host=link, inter_host=link
        )
        best = bapipe.plan(PROFILE, cluster, minibatch_size=8, schedules=["1f1b"])
        assert point.row["step_ns"] == best.prediction.step_ns


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_of_a_sweep_that_is_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_processes, "_search", _killed)
    point = Point(cluster=CLUSTER, options=PlanOptions(minibatch_size=8, schedules=["1f1b"]))
    with pytest.raises(BapipeError) as caught:
        plan_chains({"a": PROFILE}, [[point], [point]], lambda done: None, exact=False, max_processes=2)
    killed = "it was killed by SIGKILL, as a system out of memory does"
    assert str(caught.value) == (
        f"a process of the sweep ended before its points were done: {killed}, {killed}; the same command goes on there"
    )


def test_short_searches_are_the_same_in_processes_and_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session({"a": PROFILE}, CLUSTER, 8)
    axes = [Axis(name="devices", values=(1, 2, 3)), Axis(name="link", values=(0.01, 0.5, 2.0))]
    chains = [[3 * devices + link for link in range(3)] for devices in range(3)]
    assert neighbours(axes, [(d, link) for d in axes[0].values for link in axes[1].values]) == chains
    done = list[int]()
    points = vary(session, axes, ["1f1b"], lambda number, total: done.append(number))
    assert done == list(range(10))
    searched = [
        [Point(cluster=point.plan.cluster, options=PlanOptions(minibatch_size=8, schedules=["1f1b"]))]
        for point in points
        if point.plan is not None
    ]
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder() / "other"))
    alone = plan_chains(session.profiles, searched, lambda done: None, exact=False, max_processes=1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder() / "another"))
    assert plan_chains(session.profiles, searched, lambda done: None, exact=False, max_processes=2) == alone

    def never(*_: object) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(nearby, "plans_nearby", never)
    assert plan_chains(session.profiles, searched, lambda done: None, exact=False, max_processes=1) == alone


def test_more_of_a_resource_never_makes_the_plan_of_a_sweep_slower() -> None:
    profile = random_profile(Random(3), 8)
    session = Session({"a": profile}, devices(4, bytes_per_s=10**5), 8)
    axes = [Axis(name="devices", values=(4, 1, 2, 3)), Axis(name="memory", values=(10**3, 10**6))]
    points = vary(session, axes, ["1f1b", "gpipe"], lambda done, total: None)
    steps = {tuple(p.values.values()): p.row.get("step_ns", 10**18) for p in points}
    for memory in axes[1].values:
        assert steps[1, memory] >= steps[2, memory] >= steps[3, memory] >= steps[4, memory]  # type: ignore[operator]
    for number in axes[0].values:
        assert steps[number, 10**3] >= steps[number, 10**6]  # type: ignore[operator]


@pytest.mark.parametrize("exact", [False, True])
def test_ctrl_c_keeps_the_points_that_are_done(
    exact: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session({"a": PROFILE}, CLUSTER, 8)
    in_full = vary(session, [Axis(name="link", values=(0.01, 0.5, 2.0))], ["1f1b"], lambda *_: None, exact=exact)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder() / "other"))
    num_searched = 0
    where, name = (sweep_processes, "plan_cached") if exact else (nearby._PointSearch, "search")
    search = getattr(where, name)

    def search_two(*given: Any) -> Any:
        nonlocal num_searched
        num_searched += 1
        if num_searched > 2:
            raise KeyboardInterrupt
        return search(*given)

    monkeypatch.setattr(where, name, search_two)
    with pytest.raises(SweepInterrupted) as ended:
        show_points(session, ["link=0.01,0.5,2"], ["1f1b"], "json", exact=exact)
    assert [point.values["link"] for point in ended.value.points] == [0.01, 0.5]
    printed = json.loads(capsys.readouterr().out)
    assert [row["step_ns"] for row in printed] == [point.row["step_ns"] for point in in_full[:2]]


def test_ctrl_c_keeps_what_processes_have_done(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = {"a": random_profile(Random(3), 8)}
    points = [
        [Point(cluster=devices(num), options=PlanOptions(minibatch_size=size, schedules=["1f1b"]))]
        for size in (4, 8, 16)
        for num in (1, 2, 3, 4, 5, 6)
    ]
    num_done = 0

    def interrupt_third(done: int) -> None:
        nonlocal num_done
        num_done = done
        if done == 3:
            signal.raise_signal(signal.SIGINT)

    plans = plan_chains(profiles, points, interrupt_third, exact=True, max_processes=2)
    assert len(plans) == len(points)
    assert sum(plan is not None for (plan,) in plans) >= 2
    assert num_done >= 3


@pytest.mark.parametrize(
    ("after", "are_found"),
    [(sweep_processes._PointDone, [[True, False]]), (sweep_processes._ChainDone, [[True, True], [False, False]])],
)
def test_a_process_of_a_sweep_that_is_to_end_sends_what_it_has(after: type, are_found: list[list[bool]]) -> None:
    sent: list[object] = []

    def send(message: object) -> None:
        sent.append(message)
        if isinstance(message, after):
            signal.raise_signal(signal.SIGTERM)

    chains = [
        [Point(cluster=devices(num), options=PlanOptions(minibatch_size=4, schedules=["1f1b"])) for num in (1, 2)]
        for _ in range(3)
    ]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with blocked(signal.SIGTERM):
            sweep_processes._search(0, send, {"a": random_profile(Random(3), 8)}, chains, True, 1)
    finally:
        signal.signal(signal.SIGTERM, handler)
    ended = [message for message in sent if isinstance(message, sweep_processes._ChainDone)]
    assert [message.number for message in ended] == list(range(len(ended)))
    assert [[plan is not None for plan in message.plans] for message in ended] == are_found


def test_a_point_where_nothing_fits_says_so() -> None:
    session = Session({"a": PROFILE}, CLUSTER, 8)
    (point,) = vary(session, [Axis(name="memory", values=(1,))], ["1f1b"], lambda done, total: None)
    assert "no plan fits" in str(point.row["why_not"])


def test_without_a_plan_at_the_first_point_there_is_no_title_of_what_is_worth_the_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Session({"a": PROFILE}, CLUSTER, 8)
    show_points(session, ["minibatch=1000000,8"], ["1f1b"], "table")
    assert "the first point, with which" in (printed := capsys.readouterr().out)
    assert "worth the most" not in printed
    show_points(session, ["minibatch=8"], ["1f1b"], "table")
    assert "worth the most, each by itself:" in capsys.readouterr().out


def test_devices_may_have_more_memory_than_those_of_the_cluster() -> None:
    session = Session({"a": PROFILE}, devices(3, bytes_per_s=10**6, memory_bytes=2), 8)
    axis = Axis(name="memory", values=(1, 10**9))
    small, large = vary(session, [axis], ["1f1b"], lambda done, total: None, exact=True)
    assert "no plan fits" in small.why_not
    roomy = devices(3, bytes_per_s=10**6, memory_bytes=10**9)
    best = bapipe.plan(PROFILE, roomy, minibatch_size=8, schedules=["1f1b"])
    assert large.plan is not None
    assert (large.plan.cluster, large.plan.prediction) == (roomy, best.prediction)


def test_a_point_whose_cluster_cannot_be_says_so() -> None:
    fast = devices(2, bytes_per_s=2**62)
    axis = Axis(name="link", values=(1.0, 4.0))
    plain, absurd = vary(Session({"a": PROFILE}, fast, 8), [axis], ["1f1b"], lambda done, total: None)
    assert plain.plan is not None
    assert absurd.why_not == f"`bytes_per_s` is {2**64}: want at most {2**63 - 1}"


def test_points_are_printed_for_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session({"a": chain([1, 2, 3, 4], param_bytes=1000)}, CLUSTER, 8)
    printed = {}
    for layout in ("json", "csv", "markdown"):
        show_points(session, ["devices=1..2", "memory=1KB,1GB"], ["1f1b"], layout)
        printed[layout] = capsys.readouterr().out
    rows = json.loads(printed["json"])
    assert [row["devices"] for row in rows] == [1, 1, 2, 2]
    assert "no plan fits" in rows[0]["why_not"]
    read = list(csv.DictReader(StringIO(printed["csv"])))
    assert [row["step_ns"] for row in read] == [str(row.get("step_ns", "")) for row in rows]
    assert printed["markdown"].splitlines()[1].startswith("| --- | --- |")
    assert len(printed["markdown"].splitlines()) == 6


def scaled_in_proportion() -> ModelProfile:
    """The figures of `PROFILE`, measured with micro-batches of 4: those of 1 and 2 are scaled from it."""
    (measured,) = PROFILE.measurements

    def scaled(size: int) -> Measurement:
        layers = [msgspec.structs.replace(m, forward_ns=m.forward_ns * size // 4) for m in measured.layers]
        return Measurement(microbatch_size=size, layers=tuple(layers))

    sizes = tuple(scaled(size) for size in (1, 2, 4))
    return msgspec.structs.replace(PROFILE, measurements=sizes, environment={SCALED: [1, 2]})


@pytest.mark.parametrize("exact", [False, True])
def test_the_micro_batch_size_of_all_points_may_be_fixed(exact: bool) -> None:
    profile = scaled_in_proportion()
    session, axes = Session({"a": profile}, CLUSTER, 8), [Axis(name="devices", values=(1, 2))]
    points = vary(session, axes, ["1f1b"], lambda done, total: None, microbatch_size=4, exact=exact)
    for point, cluster in zip(points, (devices(1, bytes_per_s=10**6), CLUSTER), strict=True):
        best = bapipe.plan(profile, cluster, minibatch_size=8, microbatch_size=4, schedules=["1f1b"])
        assert (point.row["microbatch_size"], point.row["step_ns"]) == (4, best.prediction.step_ns)
    (point,) = vary(session, [Axis(name="link", values=(1,))], ["1f1b"], lambda *_: None, microbatch_size=3)
    assert point.why_not == "a mini-batch of 8 does not divide into micro-batches of 3"


def test_sizes_that_were_not_measured_are_said_once_below_the_points(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session({"a": scaled_in_proportion()}, CLUSTER, 1)
    remark = (
        "micro-batches of 1 were not measured on none: their times are in proportion to those of 4, which small "
        "ones seldom reach; --microbatch-size 4 plans with measured times"
    )
    show_points(session, ["devices=1..2"], ["1f1b"], "table")
    table = " ".join(capsys.readouterr().out.split())
    assert (table.endswith(remark), table.count("not measured")) == (True, 1)
    show_points(session, ["devices=1..2"], ["1f1b"], "json")
    printed = capsys.readouterr()
    assert [row["microbatch_size"] for row in json.loads(printed.out)] == [1, 1]
    assert printed.err.endswith(f"{remark}\n")
    show_points(session, ["minibatch=8"], ["1f1b"], "table", microbatch_size=4)
    assert "not measured" not in capsys.readouterr().out


def test_other_links_are_said_not_to_change_what_members_of_groups_exchange(
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace = msgspec.structs.replace
    group = replace(PROFILE, device=replace(PROFILE.device, members=2, split="filter"))
    of_two = tuple(replace(d, members=(f"{d.name}.0", f"{d.name}.1")) for d in CLUSTER.devices)
    session = Session({"a": group}, replace(CLUSTER, devices=of_two), 8)
    for of, axis, is_said in (
        (session, "link=1,100", True),
        (session, "latency=1,2", True),
        (session, "devices=1..2", False),
        (Session({"a": PROFILE}, CLUSTER, 8), "link=1,100", False),
    ):
        show_points(of, [axis], ["1f1b"], "table")
        assert ("as the profile says, whatever the links" in " ".join(capsys.readouterr().out.split())) is is_said


def test_plans_that_run_i_and_w_apart_say_if_these_are_halves(capsys: pytest.CaptureFixture[str]) -> None:
    halved = msgspec.structs.replace(PROFILE, environment={HALVED: "halves of B"})
    show_points(Session({"a": halved}, CLUSTER, 8), ["link=1,100"], ["zb-h1"], "table")
    assert capsys.readouterr().out.count("are halves of a backward") == 1


def test_why_a_point_has_no_plan_names_options(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session({"a": PROFILE}, CLUSTER, 8)
    show_points(session, ["minibatch=1000000"], ["1f1b"], "json")
    (row,) = json.loads(capsys.readouterr().out)
    assert "choose a smaller --minibatch-size" in row["why_not"]


def test_an_unknown_schedule_is_an_error_rather_than_a_reason_of_each_point() -> None:
    with pytest.raises(BapipeError, match="unknown schedule 'foo'; choose from gpipe, 1f1b"):
        show_points(Session({"a": PROFILE}, CLUSTER, 8), ["devices=1..2"], ["1f1b", "foo"], "table")


def test_the_table_says_why_a_point_has_no_plan_but_not_what_to_do() -> None:
    reason = (
        "the cluster: with a latency of 9,000,000,000,000,000 ns a step of 8 samples could take more than four years"
    )
    table = variations_table(["latency"], [{"latency": 10**6, "why_not": f"{reason}; check the unit"}])
    assert [*table.columns[6].cells] == [reason]


def test_the_resource_that_is_worth_most_comes_first() -> None:
    figures = {(1, 1): 10.0, (1, 2): 11.0, (4, 1): 25.0, (4, 2): 99.0}
    rows = [{"devices": d, "link": link, "samples_per_s": s, "step_ns": 1} for (d, link), s in figures.items()]
    assert worth_words(["link", "devices"], rows) == [
        "devices 4 instead of 1: 2.50 times the samples/s",
        "link 2 instead of 1: 1.10 times the samples/s",
    ]
    assert worth_words(["link", "devices"], rows[:1]) == ["no other value is worth more than 0.5 %, by itself"]
    assert worth_words(["link"], [{"link": 1, "why_not": "no plan fits"}]) == [
        "the first point, with which the others would be compared, has no plan"
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [("link=0.5,1,2", (0.5, 1, 2)), ("devices=2..4,8", (2, 3, 4, 8)), ("memory=1KB,2 GiB", (1000, 2**31))],
)
def test_axes_are_read(text: str, values: tuple[float, ...]) -> None:
    assert parse_axis(text).values == values


@pytest.mark.parametrize("text", ["links=1", "link"])
def test_other_axes_are_refused(text: str) -> None:
    with pytest.raises(BapipeError, match=f"--vary {text}: want"):
        parse_axis(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("link=x", "'x' is not a number"),
        ("link=nan", "'nan' is not a number"),
        ("link=1,,2", "'' is not a number"),
        ("link=1,0", "'0' is not positive"),
        ("latency=-1", "'-1' is not positive"),
        ("memory=16,8", "'16' is 16 bytes"),
        ("link=1e300", "'1e300' is more than 1,000,000"),
        ("link=inf", "'inf' is more than 1,000,000"),
        ("latency=1000001", "'1000001' is more than 1,000,000"),
        (f"minibatch={10**19}", f"'{10**19}' is more than 1,000,000,000,000,000,000"),
        ("devices=999", "'999' is more than 256"),
        ("devices=1.5", "'1.5' is not a whole number"),
        ("devices=0..2", "'0..2' has values that are not positive"),
        (f"devices=2..{10**30}", f"'2..{10**30}' goes beyond 256"),
        ("devices=2..x", "'2..x' is not a whole number"),
        ("devices=4..2", "'4..2' ends before it begins"),
        ("minibatch=1..10001", "'1..10001' has more than 10,000 values"),
    ],
)
def test_what_is_wrong_with_a_value_of_an_axis_is_said(text: str, fault: str) -> None:
    with pytest.raises(BapipeError) as refused:
        parse_axis(text)
    assert str(refused.value).startswith(f"--vary {text}: {fault}: want values such as {text.partition('=')[0]}=")


def test_the_order_of_columns_does_not_depend_on_the_point_that_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = bapipe.plan(chain([1, 1]), devices(2), minibatch_size=4)
    fits, none = (
        sweep.Point(values={"memory": 2}, plan=found),
        sweep.Point(values={"memory": 1}, plan=None, why_not="too large"),
    )
    heads = []
    for points in ([fits, none], [none, fits]):
        _write_cells(["memory"], points, "csv")
        heads.append(capsys.readouterr().out.splitlines()[0])
    assert heads[0] == heads[1]
    assert heads[0].startswith("memory,step_ns,")
    assert heads[0].endswith(",why_not")
