"""What the page of the explorer asks: simulated states, plans, exports, and a server that answers its own page alone."""

import http.client
import json
import shlex
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

import bapipe
from bapipe.cli import app
from bapipe.cli.edit_command import command_lines
from bapipe.errors import BapipeError
from bapipe.explorer.analyses import Analyses, axis_values
from bapipe.explorer.background import Job
from bapipe.explorer.document import standalone_page
from bapipe.explorer.server import Server
from bapipe.explorer.session import Session
from bapipe.explorer.state import State, cluster_of
from bapipe.explorer.vary import FIELDS, on_axis
from bapipe.formats.certificate import OVER_LIMIT
from bapipe.formats.cluster import Link
from bapipe.formats.codec import decode, read, write
from bapipe.formats.plan import Plan
from bapipe.planner.analysis.explain import TOPICS
from bapipe.planner.analysis.pareto import pareto
from bapipe.planner.inputs.options import RUNNABLE, PlanOptions
from bapipe.report.idle_time import CAUSES, idle_ns_by_cause
from bapipe.schedules import ALL, SIDE_BY_SIDE
from bapipe.simulator.simulate import simulate
from tests.builders import MS, chain, devices
from tests.explorer.page_data import data_of, loads_nothing
from tests.random_profiles import random_cluster, random_profile
from tests.sources import PACKAGE

PROFILE = chain([1, 2, 3, 4, 2, 1, 5, 2], param_bytes=100, stash_bytes=10, output_bytes=1000)
CLUSTER = devices(3, bytes_per_s=10**6)
SOURCE = "profile.json", "--cluster", "cluster.json"


def session(start: Plan | int = 12) -> Session:
    plan = start if isinstance(start, Plan) else None
    source = SOURCE if plan is None else ("plan.json",)
    commands = partial(command_lines, given=CLUSTER, source=source, start=plan)
    return Session({"a": PROFILE}, CLUSTER, start, commands)


def test_the_page_begins_with_the_plan_given() -> None:
    plan = bapipe.plan(PROFILE, CLUSTER, minibatch_size=12, num_stages=3)
    page = session(plan)
    assert page.plan(page.first) == replace(plan, alternatives=(), certificate=page.plan(page.first).certificate)
    answer: Any = page.judge(page.first)
    assert answer["step"] == plan.prediction.step_ns
    assert answer["bound"] == {
        "ns": plan.certificate.lower_bound_ns, "space": plan.certificate.space, "searched": True,
    }  # fmt: skip
    assert Analyses(page).background.status() == {"running": False}


def test_a_bound_proven_under_a_memory_limit_is_not_shown_for_plans_that_need_more() -> None:
    free = bapipe.plan(PROFILE, CLUSTER, minibatch_size=12, num_stages=3)
    options: dict[str, Any] = {"minibatch_size": 12, "num_stages": 3, "schedules": "1f1b"}
    limit = bapipe.plan(PROFILE, CLUSTER, **options).prediction.peak_bytes
    plan = bapipe.plan(PROFILE, CLUSTER, **options, memory_limit_bytes=limit)
    page = session(plan)
    answer: Any = page.judge(page.first)
    assert answer["bound"]["space"].endswith(f"; with at most {limit:,} bytes on each device")
    larger = msgspec.structs.replace(page.first, schedule="gpipe")
    answer = page.judge(larger)
    assert max(rank["peak"] for rank in answer["ranks"]) > limit
    assert not answer["bound"]["searched"]
    page.adopt(free)  # a bound of plans that may use all memory is preferred
    answer = page.judge(larger)
    assert answer["bound"] == {
        "ns": free.certificate.lower_bound_ns, "space": free.certificate.space, "searched": True,
    }  # fmt: skip


def test_a_bound_of_a_wider_search_is_kept_beside_a_larger_one_of_a_narrower() -> None:
    narrow = bapipe.plan(PROFILE, CLUSTER, minibatch_size=12, num_stages=2, replicas=False)
    wide = bapipe.plan(PROFILE, CLUSTER, minibatch_size=12)
    assert wide.certificate.lower_bound_ns <= wide.prediction.step_ns < narrow.certificate.lower_bound_ns
    for first, then in ((narrow, wide), (wide, narrow)):
        page = session(first)
        found = {plan.prediction.step_ns: page.adopt(plan) for plan in (first, then)}
        for plan in (narrow, wide):
            answer: Any = page.judge(found[plan.prediction.step_ns])
            assert answer["bound"] == {
                "ns": plan.certificate.lower_bound_ns, "space": plan.certificate.space, "searched": True,
            }  # fmt: skip
            assert page.plan(found[plan.prediction.step_ns]).certificate.gap == plan.certificate.gap


def test_a_plan_with_a_bound_found_on_the_page_names_the_memory_limit_of_that_bound() -> None:
    options: dict[str, Any] = {"minibatch_size": 12, "num_stages": 3, "schedules": "1f1b"}
    limit = bapipe.plan(PROFILE, CLUSTER, **options).prediction.peak_bytes
    limited = bapipe.plan(PROFILE, CLUSTER, **options, memory_limit_bytes=limit)
    page = session()
    page.adopt(limited)
    made = page.plan(msgspec.structs.replace(session(limited).first, schedule="gpipe", cuts=(1, 7)))
    assert made.prediction.peak_bytes > limit
    assert made.certificate.lower_bound_ns == limited.certificate.lower_bound_ns < made.prediction.step_ns
    assert made.certificate.memory == limited.certificate.memory
    assert made.certificate.space.endswith(OVER_LIMIT)


def test_without_a_plan_the_page_begins_with_a_stage_on_each_device() -> None:
    page = session()
    assert page.first.devices == (("d0",), ("d1",), ("d2",))
    answer: Any = page.judge(page.first)
    assert not answer["bound"]["searched"]
    assert answer["step"] == page.plan(page.first).prediction.step_ns
    assert [rank["device"] for rank in answer["ranks"]] == ["d0", "d1", "d2"]


@pytest.mark.parametrize("seed", range(6))
def test_every_state_has_the_times_of_its_plan(seed: int) -> None:
    random = Random(seed)
    profile, cluster = random_profile(random, 7), random_cluster(random, 3)
    page = Session({"a": profile}, cluster, 12)
    for _ in range(10):
        cuts = tuple(sorted(random.sample(range(1, 7), 2)))
        schedule = random.choice([name for name in ALL if name not in ("fbp-as",)])
        bandwidth = random.choice([0.5, 1.0, 4.0])
        state = replace(page.first, cuts=cuts, schedule=schedule, bandwidth=bandwidth, speeds={"d1": 0.7})
        if len(page.first.cuts) != 2:
            continue
        answer: Any = page.judge(state)
        if "error" in answer:
            continue
        plan = page.plan(state)
        timeline = simulate(plan, {"a": profile})
        assert timeline.step_ns == answer["step"] == plan.prediction.step_ns
        assert sum(len(spans["start"]) for spans in answer["timeline"]["spans"]) == len(timeline.spans)
        for rank, row in zip(plan.prediction.ranks, answer["ranks"], strict=True):
            assert row["peak"] == rank.peak_bytes
            assert (row["busy"], row["sync"], row["idle"]) == (rank.busy_ns, rank.sync_ns, rank.idle_ns)
            assert sum(row["causes"].values()) == rank.idle_ns


def test_idle_time_is_told_apart_by_its_cause() -> None:
    """Two stages of 1 ms F and 2 ms B, 1 ms for each transfer; two micro-batches, 1F1B.

    d0  F0 F1          B0 B0          B1 B1
    d1        F0 B0 B0 F1 B1 B1
    """
    profile = chain([1, 1], output_bytes=10**6)
    plan = bapipe.make(profile, devices(2, bytes_per_s=10**9), minibatch_size=2, cuts=[1])
    first, last = idle_ns_by_cause(simulate(plan, {"a": profile}))
    assert set(first) == set(CAUSES)
    # d0 waits from 2 to 6 ms, in the last of which its gradient arrives, and from 8 to 9 ms for the next transfer.
    assert (first["another stage"], first["transfer"]) == (3 * 10**6, 10**6 + 10**6)
    assert last["before its first action"] == 2 * 10**6
    assert last["after its last action"] == 11 * 10**6 - 8 * 10**6


def test_a_state_that_cannot_run_says_why() -> None:
    page = session()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"schedule": "zb-v"}, "schedule 'zb-v' on 3 devices has 6 stages"),
        ({"devices": (("d0",), ("d1",), ("x",))}, "has no device 'x'"),
        ({"cuts": (3, 3)}, "leave a stage without layers"),
        ({"minibatch_size": 7, "microbatch_size": 2}, "does not divide"),
        ({"layer_order": (1, 0)}, "the order of the layers"),
        (
            {"minibatch_size": 2**30, "microbatch_size": 1},
            "3 stages of 1,073,741,824 micro-batches: want at most 2,097,152",
        ),
    ]
    for changes, message in cases:
        assert message in str(page.judge(replace(page.first, **changes))["error"])
    with pytest.raises(BapipeError, match="3 stages of 1,073,741,824 micro-batches: want at most 2,097,152 forwards"):
        page.default_devices(replace(page.first, minibatch_size=2**30, microbatch_size=1, schedule="zb-v"), None)


def test_a_plan_that_does_not_fit_is_shown_with_what_it_lacks() -> None:
    page = session()
    answer: Any = page.judge(replace(page.first, memory_bytes=400))
    assert all(rank["limit"] == 400 for rank in answer["ranks"])
    assert any(rank["peak"] > 400 for rank in answer["ranks"])


def test_the_cluster_of_a_state() -> None:
    first = session().first
    assert cluster_of(first, CLUSTER) == CLUSTER
    larger = cluster_of(replace(first, num_devices=5, speeds={"d1": 0.5}, bandwidth=2.0, memory_bytes=7), CLUSTER)
    assert [device.name for device in larger.devices] == ["d0", "d1", "d2", "a3", "a4"]
    assert [device.speed for device in larger.devices] == [1.0, 0.5, 1.0, 1.0, 1.0]
    assert {device.memory_bytes for device in larger.devices} == {7}
    assert larger.intra_host.bytes_per_s == 2 * 10**6
    most = max(device.memory_bytes for device in CLUSTER.devices)
    assert {device.memory_bytes for device in cluster_of(replace(first, memory_bytes=2 * most), CLUSTER).devices} == {
        2 * most
    }


def test_a_cluster_of_groups_has_as_many_as_the_page_says() -> None:
    groups = tuple(
        replace(device, name=f"pair{i}", members=(f"m{2 * i}", f"m{2 * i + 1}"))
        for i, device in enumerate(CLUSTER.devices[:2])
    )
    links = tuple(Link(source=a, target=b, bytes_per_s=10, latency_ns=0) for a, b in (("m0", "m1"), ("m2", "m3")))
    given = replace(CLUSTER, devices=groups, links=links)
    first = replace(session().first, num_devices=2)
    assert cluster_of(first, given) == given
    assert cluster_of(replace(first, num_devices=1), given) == replace(given, devices=groups[:1], links=links[:1])
    more = cluster_of(replace(first, num_devices=4), given)
    assert [device.members for device in more.devices[2:]] == [("a2.0", "a2.1"), ("a3.0", "a3.1")]
    assert more.links == links


def test_stages_are_spread_over_devices_when_their_number_changes() -> None:
    page = session()
    two = page.default_devices(page.first, 2)
    assert (len(two.cuts), two.devices) == (1, (("d0",), ("d1",)))
    folded = page.default_devices(replace(page.first, schedule="zb-v"), None)
    assert len(folded.devices) == 6
    assert "error" not in page.judge(folded)
    with pytest.raises(BapipeError, match="4 stages on 3 devices"):
        page.default_devices(page.first, 4)


def test_beyond_a_cluster_of_several_hosts_there_are_more_hosts_like_the_last() -> None:
    hosts = ("first", "host2", "host2")
    given = [replace(CLUSTER.devices[0], name=f"g{i}", host=host) for i, host in enumerate(hosts)]
    cluster = replace(CLUSTER, devices=tuple(given), links=())
    larger = cluster_of(replace(session().first, num_devices=8), cluster)
    assert larger.devices[:3] == cluster.devices
    assert [device.host for device in larger.devices[3:]] == ["host3", "host3", "host4", "host4", "host5"]
    assert [device.name for device in larger.devices[3:]] == ["a3", "a4", "a5", "a6", "a7"]


@pytest.mark.parametrize(("schedule", "num_devices", "num_stages"), [("1f1b", 200, 8), ("zb-v", 5, 8), ("zb-v", 3, 6)])
def test_more_devices_than_the_model_has_stages_are_left_idle(schedule: str, num_devices: int, num_stages: int) -> None:
    """The model has 8 layers."""
    page = session()
    more = page.default_devices(replace(page.first, schedule=schedule, num_devices=num_devices), None)
    assert (len(more.devices), more.num_devices) == (num_stages, num_devices)
    assert "error" not in page.judge(more)


def searched(page: Session, state: State, schedules: tuple[str, ...] = ("1f1b", "gpipe")) -> State:
    analyses = Analyses(page)
    analyses.best(state, schedules, 1000)
    return msgspec.convert(ended(analyses)["state"], State)


def ended(analyses: Analyses) -> dict[str, Any]:
    """The status of the job when it has ended."""
    while (status := analyses.background.status())["running"]:
        time.sleep(0.01)
    return status


def test_all_schedules_of_the_page_are_those_that_can_run() -> None:
    controls = (PACKAGE / "explorer" / "page" / "controls.js").read_text()
    assert 'this.searched.value === "all" ? ["all"]' in controls
    assert not any(name in controls for name in SIDE_BY_SIDE)
    profile, cluster = chain([1, 2]), devices(2)
    page = Session({"a": profile}, cluster, 2, lambda *_: [])
    found: Any = page.judge(searched(page, page.first, ("all",)))
    assert found["step"] == bapipe.plan(profile, cluster, minibatch_size=2, schedules=RUNNABLE).prediction.step_ns


def test_best_asks_the_planner_and_its_bound_is_kept() -> None:
    page = session()
    best = searched(page, page.first)
    found: Any = page.judge(best)
    planned = bapipe.plan(PROFILE, CLUSTER, minibatch_size=12)
    assert found["step"] == planned.prediction.step_ns
    before: Any = page.judge(page.first)
    assert before["bound"]["searched"]
    assert before["bound"]["ns"] == found["bound"]["ns"]
    certificate = page.plan(page.first).certificate
    assert certificate.lower_bound_ns == before["bound"]["ns"]
    assert not certificate.proven_optimal
    assert page.changes(page.first, best)[0].startswith("step: ")
    pinned = searched(page, replace(page.first, constraints=("l0 on d2",)))
    assert "d2" in pinned.devices[0]


def test_a_search_that_fails_says_why_and_one_that_is_superseded_says_nothing() -> None:
    page = session()
    analyses = Analyses(page)
    analyses.best(replace(page.first, memory_bytes=1), ("1f1b",), 1000)
    assert "no plan fits" in ended(analyses)["error"]
    analyses.best(page.first, ("1f1b",), 1000)
    analyses.explain(page.first, ("1f1b",), 1000)
    found = ended(analyses)
    assert found["kind"] == "explain"
    assert set(found["why"]) == set(TOPICS)
    assert found["of"] == msgspec.to_builtins(page.first)
    with pytest.raises(BapipeError, match="no axis 'x': want link, latency, devices, memory, minibatch"):
        analyses.sweep("x", page.first, ("1f1b",), 1000)


def test_a_job_that_fails_ends_with_the_fault_and_logs_where(caplog: pytest.LogCaptureFixture) -> None:
    def fail(job: Job) -> dict[str, object]:
        raise RuntimeError("a fault")

    analyses = Analyses(session())
    analyses.background.begin("front", 1000, fail)
    said = "front failed: a fault; bapipe explore has printed where"
    assert ended(analyses) == {"running": False, "kind": "front", "error": said}
    assert "raise RuntimeError" in caplog.text


def test_a_job_that_is_stopped_gives_what_it_has_found() -> None:
    analyses, goes_on = Analyses(session()), threading.Event()

    def count(job: Job) -> dict[str, object]:
        job.report(done=1)
        while not job.deadline.is_over:
            goes_on.wait(0.01)
        return {"done": 2}

    analyses.background.begin("sweep", 1000, count)
    analyses.background.stop()
    assert ended(analyses) == {"running": False, "kind": "sweep", "done": 2}


def test_the_points_of_the_front_are_states_of_the_page() -> None:
    page = session()
    analyses = Analyses(page)
    analyses.front(page.first, ("1f1b",), 1000)
    points = ended(analyses)["points"]
    options = PlanOptions(minibatch_size=12, schedules=("1f1b",))
    expected = pareto(page.profiles, CLUSTER, options)
    assert [(p["step"], p["peak"], p["devices"]) for p in points] == [
        (point.step_ns, point.peak_bytes, point.num_devices) for point in expected
    ]
    for point in points:
        answer: Any = page.judge(msgspec.convert(point["state"], State))
        assert answer["step"] == point["step"]


def test_a_curve_over_many_devices_has_each_number_once() -> None:
    page = session()
    assert list(axis_values("devices", replace(page.first, num_devices=200), page)) == [25, 50, 100, 150, 200, 256]
    assert list(axis_values("devices", replace(page.first, num_devices=256), page)) == [32, 64, 128, 192, 256]


@pytest.mark.parametrize("axis", ["link", "devices", "memory", "minibatch"])
def test_a_curve_has_the_best_plan_at_each_value_and_the_plan_of_the_page(axis: str) -> None:
    page = session()
    analyses = Analyses(page)
    state = replace(page.first, memory_bytes=6000)
    analyses.sweep(axis, state, ("1f1b",), 1000)
    points = ended(analyses)["points"]
    values = [point["value"] for point in points]
    assert values == sorted(set(values)) == list(axis_values(axis, state, page))
    assert any("step" in point for point in points)
    for point in points:
        there = on_axis(state, axis, point["value"])
        if "whyNot" in point:
            assert "no plan fits" in point["whyNot"]
            continue
        best = bapipe.plan(PROFILE, cluster_of(there, CLUSTER), minibatch_size=there.minibatch_size, schedules=["1f1b"])
        assert point["step"] == best.prediction.step_ns
        assert point["state"][FIELDS[axis]] == point["value"]
        if point["same"] is not None:
            same: Any = page.judge(there)
            assert point["same"] == same["step"] >= point["step"]


def test_a_point_of_a_curve_has_the_plan_before_if_its_search_ended_without(monkeypatch: pytest.MonkeyPatch) -> None:
    page = session()
    slow = page.plan(page.first)
    fast = bapipe.plan(PROFILE, CLUSTER, minibatch_size=12, schedules=["1f1b"])
    assert fast.prediction.step_ns < slow.prediction.step_ns
    found = iter((fast, slow, slow, slow, slow, slow, slow))
    monkeypatch.setattr("bapipe.explorer.analyses.best_at", lambda *given: next(found))
    analyses = Analyses(page)
    analyses.sweep("memory", page.first, ("1f1b",), 1000)
    points = ended(analyses)["points"]
    assert [point["step"] for point in points] == [fast.prediction.step_ns] * len(points)
    assert not any(point["isNewKind"] for point in points)


def test_the_command_lines_name_what_differs() -> None:
    page = session()
    answer: Any = page.judge(replace(page.first, recompute=(True, False, False)))
    first, second = answer["command"]
    assert first == "bapipe plan profile.json --cluster cluster.json -o plan.json"
    assert second.startswith("bapipe edit plan.json --cut l")
    assert "--place 'stage 0 on d0'" in second
    assert "--recompute 0 --keep 1" in second
    other: Any = page.judge(replace(page.first, bandwidth=2.0))
    assert other["command"] == []
    plan = bapipe.plan(PROFILE, CLUSTER, minibatch_size=12, num_stages=3)
    of_plan = session(plan)
    same: Any = of_plan.judge(of_plan.first)
    assert same["command"] == ["bapipe edit plan.json -o mine.json"]


def test_the_command_lines_name_the_profiles_that_the_page_was_opened_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = list[Session]()

    def opened(page: Session, port: int) -> Server:
        pages.append(page)
        raise BapipeError("no server")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bapipe.cli.explore.Server", opened)
    write(tmp_path / "profile.json", PROFILE)
    write(tmp_path / "plan.json", bapipe.make(PROFILE, CLUSTER, minibatch_size=12, num_stages=3))
    CliRunner().invoke(app, ["explore", "plan.json", "--profile", "profile.json"])
    answer: Any = pages[0].judge(pages[0].first)
    assert answer["command"] == ["bapipe edit plan.json --profile profile.json -o mine.json"]


def random_state(random: Random, like: State) -> State:
    """Half of them have other stages, one to three, some with replicas; stages keep or recompute all or some layers."""
    cuts, groups = like.cuts, like.devices
    if random.random() < 0.5:
        num_stages = random.randrange(1, 4)
        names = random.sample([device.name for device in CLUSTER.devices], random.randrange(num_stages, 4))
        ends = (0, *sorted(random.sample(range(1, len(names)), num_stages - 1)), len(names))
        cuts = tuple(sorted(random.sample(range(1, len(PROFILE.layers)), num_stages - 1)))
        groups = tuple(tuple(names[begin:end]) for begin, end in pairwise(ends))
    return replace(
        like,
        cuts=cuts,
        devices=groups,
        recompute=tuple(random.random() < 0.5 for _ in groups),
        recompute_layers=tuple(sorted(random.sample([layer.name for layer in PROFILE.layers], random.randrange(4)))),
        schedule=random.choice(["1f1b", "gpipe"]),
        minibatch_size=random.choice([6, 12]),
    )


@pytest.mark.parametrize("begins_with_plan", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_commands_of_every_state_make_its_plan(
    seed: int, begins_with_plan: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "profile.json", PROFILE)
    write(tmp_path / "cluster.json", CLUSTER)
    random, first = Random(seed), session().first
    start = session().plan(random_state(random, first))
    page = session(start if begins_with_plan else 12)
    write(tmp_path / "plan.json", start)  # else what `bapipe plan` has found, whatever it is
    num_stages = Counter[int]()
    for state in (page.first, *(random_state(random, page.first) for _ in range(20))):
        expected = page.plan(state)
        answer: Any = page.judge(state)
        command = answer["command"][-1]
        words = [*shlex.split(command)[1:], "--profile", "profile.json"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (command, done.exception)
        made = read(tmp_path / "mine.json", Plan)
        for name in ("stages", "schedule", "minibatch_size", "microbatch_size", "order"):
            assert getattr(made, name) == getattr(expected, name), command
        num_stages[len(made.stages)] += 1
    assert num_stages[1]


def test_no_command_makes_a_plan_of_layers_in_another_order_than_the_plan_to_begin_with() -> None:
    profile = random_profile(Random(3), 8)
    plan = bapipe.make(profile, CLUSTER, minibatch_size=12, num_stages=3)
    page = Session({"a": profile}, CLUSTER, plan, partial(command_lines, given=CLUSTER, source=("p",), start=plan))
    order = (1, 0, *range(2, 8))
    assert page.judge(page.first)["command"]
    assert page.judge(replace(page.first, layer_order=order))["command"] == []


def test_the_page_without_a_server_holds_the_plans_that_were_tried() -> None:
    layers = tuple(replace(layer, name=f"</script><b>{layer.name}") for layer in PROFILE.layers)
    page = Session({"a": replace(PROFILE, layers=layers, model="<i>x</i>")}, CLUSTER, 12)
    other = replace(page.first, schedule="gpipe")
    text = standalone_page(page, page.first, (("start", page.first), ("other", other)))
    assert loads_nothing(text)
    assert b"<i>x</i>" not in text
    content = data_of(text)
    assert [entry["name"] for entry in content["tried"]] == ["start", "other"]
    assert content["model"]["layers"][0]["name"] == "</script><b>l0"
    steps = [page.plan(state).prediction.step_ns for state in (page.first, other)]
    assert [entry["answer"]["step"] for entry in content["tried"]] == steps


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(session()) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(
    server: Server, method: str, name: str, body: object = None, *, path: str | None = None, **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    content = None if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}
    connection.request(method, path or f"/{server.secret}/{name}", content, sent)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def test_the_server_answers_its_page(server: Server) -> None:
    status, page = ask(server, "GET", "")
    assert status == 200
    assert b"<html" in page
    model = json.loads(ask(server, "POST", "model", {})[1])
    state = model["state"]
    judged = json.loads(ask(server, "POST", "judge", {"state": state})[1])
    exported = json.loads(ask(server, "POST", "export", {"state": state, "kind": "plan"})[1])
    plan = decode(exported["text"].encode())
    assert isinstance(plan, Plan)
    assert simulate(plan, {"a": PROFILE}).step_ns == judged["step"]
    assert json.loads(ask(server, "POST", "sizes", {"state": state})[1]) == [1]
    assert json.loads(ask(server, "POST", "layers", {"microbatch_size": 1})[1])["measured"]
    assert len(json.loads(ask(server, "POST", "stages", {"state": state, "num_stages": 2})[1])["cuts"]) == 1
    refused = ask(server, "POST", "stages", {"state": state, "num_stages": 0})
    assert (refused[0], json.loads(refused[1])) == (200, {"error": "Expected int >= 1 - at $.num_stages"})
    compared = {"before": state, "after": state}
    assert json.loads(ask(server, "POST", "compare", compared)[1]) == ["no difference"]
    for kind, begin in (("html", "<!DOCTYPE html>"), ("cluster", "{")):
        assert json.loads(ask(server, "POST", "export", {"state": state, "kind": kind})[1])["text"].startswith(begin)
    begun = {"state": state, "kind": "sweep", "axis": "link", "schedules": ["1f1b"]}
    assert json.loads(ask(server, "POST", "begin", begun)[1]) == {}
    assert "no axis" in json.loads(ask(server, "POST", "begin", begun | {"axis": "x"})[1])["error"]
    while (status := json.loads(ask(server, "POST", "status", {})[1]))["running"]:
        time.sleep(0.01)
    assert status["axis"] == "link"
    assert json.loads(ask(server, "POST", "stop", {})[1]) == {}


def test_a_page_that_was_closed_is_no_error_of_the_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for error, is_told in ((BrokenPipeError(), False), (ValueError("a fault"), True)):
        try:
            raise error
        except Exception:
            server.handle_error(None, ("127.0.0.1", 1))
        assert ("ValueError: a fault" in capsys.readouterr().err) == is_told


def test_the_server_refuses_what_its_page_does_not_send(server: Server) -> None:
    state = json.loads(ask(server, "POST", "model", {})[1])["state"]
    assert ask(server, "GET", "", path="/")[0] == 403
    assert ask(server, "GET", "", path="/wrong/")[0] == 403
    assert ask(server, "GET", "", path=f"/{server.secret}")[0] == 403
    assert ask(server, "GET", "", Host="evil.example")[0] == 403
    assert ask(server, "GET", "", Host=f"evil.example:{server.server_port}")[0] == 403
    assert ask(server, "POST", "judge", {"state": state}, Origin="http://evil.example")[0] == 403
    assert (
        ask(server, "POST", "judge", {"state": state}, Origin=server.address[: server.address.index("/", 7)])[0] == 200
    )
    assert ask(server, "POST", "judge", {"state": state}, Content_Type="text/plain")[0] == 415
    assert ask(server, "POST", "judge", {"state": state}, Content_Length="999999999")[0] == 413
    assert ask(server, "POST", "judge", {"state": state}, Content_Length="9" * 5_000)[0] == 413
    assert ask(server, "POST", "x", {})[0] == 404
    assert ask(server, "GET", "x")[0] == 404
    assert ask(server, "GET", "", Host=f"localhost:{server.server_port}")[0] == 200
    bodies: list[dict[str, Any]] = [{}, {"state": {}}, {"state": state, "more": 1}, {"state": state | {"cuts": ["x"]}}]
    for body in bodies:
        assert "error" in json.loads(ask(server, "POST", "judge", body)[1])


def test_the_server_listens_on_this_machine_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.address.startswith("http://127.0.0.1:")
    with pytest.raises(BapipeError, match=rf"port {server.server_port}: Address already in use; leave `port` out"):
        Server(session(), server.server_port)


def test_a_port_that_is_taken_is_said_before_a_model_is_measured(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[object]()
    monkeypatch.setattr("bapipe.cli.explore.profiles_by_kind", lambda *given: measured.append(given))
    ran = CliRunner().invoke(app, ["explore", "vgg16", "--port", str(server.server_port)])
    assert str(ran.exception) == f"port {server.server_port}: Address already in use; leave `port` out for a free one"
    assert not measured


def test_a_page_of_more_devices_than_it_shows_is_refused() -> None:
    most = Session({"a": PROFILE}, devices(256), 12)
    with Server(most):
        pass
    more = Session({"a": PROFILE}, devices(257), 12)
    with pytest.raises(
        BapipeError, match="257 devices: the page shows at most 256; explore some of them, by `num_devi"
    ):
        Server(more)


def test_a_cluster_of_devices_without_a_profile_is_refused() -> None:
    with pytest.raises(BapipeError, match=r"^no profile for device 'd0' of kind 'a'; given: b; profile the model on"):
        Session({"b": replace(PROFILE, device=replace(PROFILE.device, kind="b"))}, CLUSTER, 12)


def test_stages_on_groups_say_how_much_of_their_time_is_exchange() -> None:
    alone = chain([1, 1, 1, 1])
    (measured,) = alone.measurements
    exchanging = tuple(replace(m, forward_exchange_ns=MS // 4, backward_exchange_ns=MS // 2) for m in measured.layers)
    group = replace(
        alone,
        device=replace(alone.device, kind="pair", members=2, split="spatial"),
        measurements=(replace(measured, layers=exchanging),),
    )
    single = devices(2)
    pair = replace(single.devices[1], name="g", kind="pair", members=("d1", "d2"))
    session = Session({"a": alone, "pair": group}, replace(single, devices=(single.devices[0], pair)), 4)
    assert session.judge(session.first)["exchange"] == [None, 0.25]
    assert "whatever the links" in str(session.model()["fixedExchange"])
    assert not Session({"a": alone}, single, 4).model()["fixedExchange"]
    assert "exchange" not in Session({"a": alone}, single, 4).judge(session.first)
