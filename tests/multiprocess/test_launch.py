"""However a run ends, every rank ends with it, and one line says why."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread, Timer

import pytest

from bapipe.errors import BapipeError, RunFailed
from bapipe.job.store import JobStore
from bapipe.training.launch.processes import launch
from tests import ROOT
from tests.multiprocess.launch_cases import (
    alone,
    both,
    default_workers,
    late_sender,
    talkative,
    three_steps,
    waits_after_its_own_work,
    waits_for_a_tensor,
    writes_a_checkpoint,
)

NAMES = ["cpu0", "cpu1"]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until_gone(pids: list[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(_alive(pid) for pid in pids):
        time.sleep(0.05)
    assert not [pid for pid in pids if _alive(pid)]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 (cpu1) failed at step 3: RuntimeError: first line"),
        (
            "kill",
            "rank 1 (cpu1) was killed by SIGKILL at step 3; a system out of memory does that: plan with less memory",
        ),
        ("exit", "rank 1 (cpu1) ended at step 3 without a word (exit code 5)"),
    ],
)
def test_one_rank_fails(how: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    last = time.monotonic()

    def remember(index: int, report: tuple[int, int]) -> None:
        nonlocal last
        seen.append((index, report[1]))
        last = time.monotonic()

    with pytest.raises(RunFailed) as caught:
        launch(both, NAMES, how, timeout_s=60, on_message=remember)
    assert time.monotonic() - last < 6
    assert str(caught.value) == message
    assert {index for index, _ in seen} == {0, 1}
    assert not [pid for _, pid in seen if _alive(pid)]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "worker", [partial(both, how="hang"), waits_for_a_tensor, waits_after_its_own_work], ids=["all", "two", "late"]
)
def test_a_frozen_rank_ends_the_run_at_the_timeout(worker: Callable[..., object]) -> None:
    with pytest.raises(RunFailed) as caught:
        launch(worker, NAMES, timeout_s=3)
    assert str(caught.value) == ("rank 1 (cpu1) hangs at step 3: rank 0 (cpu0) waited more than 3 s for another rank")
    assert caught.value.lost == ("cpu1",)


def test_ranks_on_a_slow_disk_do_not_hang_and_one_that_is_frozen_does(tmp_path: Path) -> None:
    """Writing takes rank 1 longer than a rank may wait for another, and then rank 0, which syncs two folders."""
    launch(writes_a_checkpoint, NAMES, str(tmp_path), "slow", timeout_s=1.5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
    with pytest.raises(RunFailed, match=r"^rank 1 \(cpu1\) hangs at step 1: rank 0 \(cpu0\) waited more than 1.5 s"):
        launch(writes_a_checkpoint, NAMES, str(tmp_path), "frozen", timeout_s=1.5)


def test_a_rank_waits_longer_for_another_one_than_connecting_may_take() -> None:
    """gloo's transfers keep the time limit of connecting, where its collectives take a later one."""
    assert launch(late_sender, NAMES, timeout_s=60) == [[("gloo", 0), ("gloo", 0)], [("gloo", 7), ("gloo", 7)]]


def test_a_callback_may_take_longer_than_the_timeout() -> None:
    num_reports = 0

    def wait_once(index: int, report: bytes) -> None:
        nonlocal num_reports
        if num_reports == 0:
            time.sleep(2.5)
        num_reports += 1

    assert launch(talkative, NAMES, timeout_s=1, on_message=wait_once) == [0, 1]
    assert num_reports == 80


@dataclass(slots=True)
class ThreeSteps:
    """What two ranks of `three_steps` left; all were paused for 3.7 s, and a rank may wait for 2 s.

    Attributes:
        results: of the ranks.
        connected: ports of the ranks to which this process could connect.
    """

    results: list[tuple[str, list[str]]]
    ports: set[int]
    connected: list[int]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> ThreeSteps:
    pids: set[int] = set()
    seen = ThreeSteps([], set(), [])

    def note(index: int, report: tuple[int, int, list[int]]) -> None:
        step, pid, ports = report
        pids.add(pid)
        seen.ports |= set(ports)
        if step == 1 and index == 1:
            for number, delay_s in ((signal.SIGSTOP, 0.3), (signal.SIGCONT, 4.0)):
                Timer(delay_s, _send, (number, pids)).start()
        for port in ports if step == 0 else ():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
                seen.connected.append(port)

    folder = str(tmp_path_factory.mktemp("attacked"))
    seen.results = launch(three_steps, NAMES, folder, timeout_s=2, on_message=note)
    return seen


def _send(number: signal.Signals, pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of a process's sockets, and filters them")


@linux_only
def test_ranks_that_are_all_paused_for_longer_than_the_timeout_continue(three: ThreeSteps) -> None:
    assert len(three.results) == 2


@linux_only
def test_nothing_connects_to_a_run_that_trains(three: ThreeSteps) -> None:
    assert three.ports
    assert three.connected == []


@linux_only
def test_a_peer_that_does_not_know_the_secret_is_found_before_the_first_step(three: ThreeSteps) -> None:
    (said,) = {said for said, _ in three.results}  # what one has found first
    assert said in [
        f"the connection of rank {own} (cpu{own}) to rank {other} (cpu{other}) leads to a process that is not of this "
        "job: start it again, and see who may use this network"
        for own, other in ((0, 1), (1, 0))
    ]


@linux_only
def test_a_stranger_in_the_place_of_a_rank_is_left_out_by_a_further_attempt(three: ThreeSteps) -> None:
    """Strangers that speak gloo's protocol: to the first group of a job, to the second, and to all attempts."""
    for _, outcomes in three.results:
        assert outcomes[:3] == ["4.0"] * 3
        assert re.match(r"rank \d \(cpu\d\) (is connected to rank \d|cannot connect)", outcomes[3])
    assert three.results[0][1][3] == three.results[1][1][3]


def _job(monkeypatch: pytest.MonkeyPatch, rank: int) -> int:
    """Makes this process one of two of a job; returns the port at which they meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
             "BAPIPE_JOB_SECRET": "known to this test"}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    return port


def test_a_rank_that_never_joins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _job(monkeypatch, 0)
    with pytest.raises(RunFailed) as caught:
        launch(alone, NAMES, timeout_s=1)
    assert str(caught.value) == "rank 1 (cpu1) did not join the job in 1 s: start all ranks, and see what ended them"
    assert not caught.value.told
    port = _job(monkeypatch, 1)
    with pytest.raises(RunFailed) as caught:
        launch(alone, NAMES, timeout_s=1)
    assert str(caught.value) == (
        f"rank 1 (cpu1) cannot reach rank 0 at MASTER_ADDR '127.0.0.1', port {port}, after 1 s: Connection refused: start "
        "all ranks, and let this one through"
    )


def test_a_rank_that_fails_before_it_joins_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _job(monkeypatch, 0)

    def fail() -> None:
        while True:
            with suppress(ConnectionRefusedError):
                JobStore(("127.0.0.1", port), b"known to this test", 60.0).add("failed", 1)
                return

    failing = Thread(target=fail)
    failing.start()
    with pytest.raises(RunFailed) as caught:
        launch(alone, NAMES, timeout_s=60)
    failing.join()
    assert str(caught.value) == "rank 1 (cpu1) did not join the job, of which a rank failed"
    assert caught.value.told


def test_an_error_on_every_rank_is_reported_once() -> None:
    with pytest.raises(BapipeError, match=r"^not on cpu$"):
        launch(alone, NAMES, timeout_s=60)


def test_workers_load_slow_data_for_a_rank_that_is_started_here() -> None:
    assert launch(default_workers, ["cpu0"], timeout_s=60) == [4]


def _parent(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    script = str(Path(__file__).with_name("launch_cases.py"))
    root = str(ROOT)
    environment = os.environ | {"PYTHONPATH": root}
    process = subprocess.Popen(
        [sys.executable, script, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    files = [folder / "0.pid", folder / "1.pid"]
    end = time.monotonic() + 90
    while not all(file.exists() and file.read_text() for file in files):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    return process, [int(file.read_text()) for file in files]


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    process, children = _parent(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=10)
    _wait_until_gone(children, 5)
    assert (process.returncode, out, err) == (130, "interrupted\n", "")


def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    process, children = _parent(tmp_path)
    process.kill()
    process.communicate(timeout=10)
    _wait_until_gone(children, 5)
