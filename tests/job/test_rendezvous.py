"""Ranks of a job wait for one another by name, agree on who reports a failure, and refuse what differs."""

import errno
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Set
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from torch.distributed import PrefixStore, TCPStore

from bapipe.errors import BapipeError, RunFailed
from bapipe.job import rendezvous
from bapipe.job import secret as secrets
from bapipe.job import server as job_server
from bapipe.job.peers import _answer
from bapipe.job.refusal import refusals_told
from bapipe.job.rendezvous import (
    REFUSED,
    OtherRanks,
    Refused,
    _differences,
    _refusal,
    open_store,
    serve,
    tell_failure,
    wait_for_all,
)
from bapipe.job.secret import job_secret
from bapipe.job.server import COMPLETE, JOINED, OTHER_VERSION, TAKEN, StoreServer, own_version
from bapipe.job.store import JobStore

NAMES = ("cpu0", "gpu1", "gpu2")
SECRET = b"known to the job only"
FACTS = {"torch": "2.13", "the plan": "5a1f"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    started = serve("127.0.0.1", 0, SECRET)
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", started.port),
        (secrets.VARIABLE, "known to the job only"),
    ):
        monkeypatch.setenv(name, str(value))
    yield started
    started.close()


@pytest.fixture
def store(server: StoreServer) -> JobStore:
    return JobStore(("127.0.0.1", server.port), SECRET, 20.0)


@pytest.mark.parametrize(
    ("name", "resolved", "on_all"),
    [("node1", "127.0.1.1", True), ("node1", "::1", True), ("localhost", "127.0.0.1", False), ("127.0.1.1", "", False)],
)
def test_rank_0_listens_where_other_hosts_reach_it_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, resolved: str, on_all: bool
) -> None:
    """Debian and Ubuntu write `127.0.1.1 node1` to the /etc/hosts of node1."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: real(resolved or host, *rest, **named))
    server = serve(name, 0, SECRET)
    monkeypatch.undo()
    bound = server._listener.getsockname()[0]
    assert (bound in ("::", "0.0.0.0")) == on_all
    assert JobStore(("127.0.0.1" if on_all else bound, server.port), SECRET, 20.0).join(0, 1) == JOINED
    server.close()


def test_all_ranks_wait_for_one_another(store: JobStore) -> None:
    ranks = [threading.Thread(target=wait_for_all, args=(store, index, NAMES, 20.0, FACTS)) for index in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    assert not any(rank.is_alive() for rank in ranks)


def test_a_key_is_waited_for_as_long_as_the_timeout_that_was_set_last(store: JobStore) -> None:
    store.set_timeout(timedelta(seconds=0.05))
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out waiting for the keys group/nobody"):
        PrefixStore("group", store).get("nobody")
    assert time.monotonic() - start_s < 10


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_whose_request_is_unknown_may_join_again(server: StoreServer, store: JobStore) -> None:
    assert store.join(0, 3) == JOINED
    with pytest.raises(ConnectionError):
        store._ask("newer")
    again = JobStore(("127.0.0.1", server.port), SECRET, 20.0)
    until = time.monotonic() + 10
    while (answer := again.join(0, 3)) != JOINED and time.monotonic() < until:
        time.sleep(0.01)
    assert answer == JOINED


def test_the_ranks_that_are_missing_are_named(store: JobStore) -> None:
    with pytest.raises(RunFailed) as caught:
        wait_for_all(store, 1, NAMES, 0.2, FACTS)
    assert str(caught.value) == (
        "rank 0 (cpu0), rank 2 (gpu2) did not join the job in 0.2 s: start all ranks, and see what ended them"
    )


def test_a_failed_rank_ends_the_waiting(store: JobStore) -> None:
    assert not tell_failure(store, 0, 3, lost_peer=False).report
    with pytest.raises(RunFailed) as caught:
        wait_for_all(store, 1, NAMES, 20.0, FACTS)
    assert str(caught.value) == "rank 0 (cpu0), rank 2 (gpu2) did not join the job, of which a rank failed"


def test_every_rank_names_the_ranks_that_differ(store: JobStore) -> None:
    said: list[str] = []

    def join(index: int, facts: dict[str, str]) -> None:
        with pytest.raises(BapipeError) as caught:
            wait_for_all(store, index, NAMES, 20.0, facts)
        said.append(str(caught.value))

    facts = [FACTS, {**FACTS, "torch": "2.12"}, {"torch": "2.13", "the plan": "77aa"}]
    ranks = [threading.Thread(target=join, args=(index, own)) for index, own in enumerate(facts)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    assert (
        said
        == [
            "the ranks differ, and would train something else: torch is 2.13 on rank 0 (cpu0), rank 2 (gpu2), but 2.12 on "
            "rank 1 (gpu1); the plan is 5a1f on rank 0 (cpu0), rank 1 (gpu1), but 77aa on rank 2 (gpu2)"
        ]
        * 3
    )


def test_a_fact_that_a_rank_lacks_differs() -> None:
    known = [{"a": "1", "b": "2"}, {"b": "2"}]
    assert _differences(NAMES[:2], known) == ["a is 1 on rank 0 (cpu0), but none on rank 1 (gpu1)"]


def test_the_first_rank_that_fails_reports(store: JobStore) -> None:
    assert [tell_failure(store, rank, 3, lost_peer=False).report for rank in range(3)] == [False, True, True]


def test_a_rank_that_lost_its_peer_lets_the_cause_be_reported_first(store: JobStore) -> None:
    cause = threading.Timer(0.2, tell_failure, (store, 0, 3, False))
    cause.start()
    assert tell_failure(store, 1, 3, lost_peer=True).report
    cause.join()


def test_the_ranks_that_have_gone_or_hang_are_told_from_those_that_lost_them(server: StoreServer) -> None:
    """Of five ranks, 1 is killed, 3 hangs, and the others notice about together; one of these says so."""
    stores = [JobStore(("127.0.0.1", server.port), SECRET, 20.0) for _ in range(5)]
    for rank, store in enumerate(stores):
        assert store.join(rank, len(stores)) == JOINED
    stores[1]._channel.connection.close()
    found: list[OtherRanks] = []
    noticing = [
        threading.Thread(target=lambda rank=rank: found.append(tell_failure(stores[rank], rank, 5, lost_peer=True)))
        for rank in (0, 2, 4)
    ]
    for thread in noticing:
        thread.start()
    for thread in noticing:
        thread.join(20)
    told = OtherRanks(report=True)
    assert sorted(found, key=lambda others: others.report) == [OtherRanks(gone=(1,), silent=(3,)), told, told]


def test_without_an_answer_of_the_store_nothing_is_known_of_the_others(store: JobStore) -> None:
    store._channel.connection.close()
    assert tell_failure(store, 1, 3, lost_peer=False) == OtherRanks()


def test_a_restarted_job_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv(secrets.VARIABLE, "known to the job only")
    for attempt, names in (("0", NAMES), ("1", NAMES), ("1", NAMES[:2])):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        assert [open_store(index, names, 20.0).add("failed", 1) for index in (0, 1)] == [1, 2]


def wait_until_left(store: JobStore, others: Set[int] = frozenset({0})) -> None:
    """Returns when the server has noticed that all ranks but some, by default the first, have left."""
    until = time.monotonic() + 10
    while store.joined() != others and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize("is_left", [False, True])
def test_a_rank_finds_the_job_after_restarts_that_its_agent_has_not_counted(
    monkeypatch: pytest.MonkeyPatch, is_left: bool
) -> None:
    """Its agent has restarted it twice, that of rank 0 has joined another round, which it does not count.

    The port of the earlier start is still known; its rank 0 has ended, or is about to.
    """
    agent = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv(secrets.VARIABLE, "known to the job only")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr("bapipe.job.rendezvous._num_opened", Counter())
    earlier = [open_store(index, NAMES[:2], 20.0) for index in (0, 1)]
    earlier[1].leave()  # killed
    if not is_left:
        earlier[0].stop_serving()
    monkeypatch.setattr("bapipe.job.rendezvous._num_opened", Counter())
    found: list[JobStore] = []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    rank = threading.Thread(target=lambda: found.append(open_store(1, NAMES[:2], 20.0)))
    rank.start()
    rank.join(0.5)
    assert not found
    earlier[0].stop_serving()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = open_store(0, NAMES[:2], 20.0)
    rank.join(20)
    assert [store.add("failed", 1) for store in (first, *found)] == [1, 2]


def test_a_rank_of_another_start_of_the_job_is_told_so(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is started again alone, without torchrun, while the others train."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setattr("bapipe.job.rendezvous.job_secret", lambda: SECRET)
    stores = [JobStore(("127.0.0.1", server.port), SECRET, 20.0) for _ in range(2)]
    for rank, store in enumerate(stores):
        assert store.join(rank, 2) == JOINED
    with pytest.raises(BapipeError, match=r"^rank 1 \(gpu1\) has joined the job at 127.0.0.1:\d+ already, as another"):
        open_store(1, NAMES[:2], 0.2)
    stores[1].leave()
    wait_until_left(stores[0])
    with pytest.raises(
        RunFailed, match=r"^rank 1 \(gpu1\) finds a job at .* that has had all of its ranks, for 1 s: end"
    ):
        open_store(1, NAMES[:2], 1.0)


def test_a_rank_that_cannot_join_its_own_store_frees_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("bapipe.job.rendezvous._join", unreachable)
    monkeypatch.setattr("bapipe.job.rendezvous._OWN_S", 0.1)
    monkeypatch.setattr("bapipe.job.rendezvous.job_secret", lambda: SECRET)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(RunFailed, match=r"^rank 0 \(cpu0\) cannot reach its own store"):
        open_store(0, NAMES[:2], 20.0)
    with socket.socket() as connection:
        assert connection.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_a_rank_that_dies_while_others_join_may_come_back(server: StoreServer) -> None:
    stores = [JobStore(("127.0.0.1", server.port), SECRET, 20.0) for _ in range(4)]
    assert [stores[rank].join(rank, 3) for rank in (0, 1)] == [JOINED, JOINED]
    stores[1].leave()
    wait_until_left(stores[0])
    assert stores[2].join(2, 3) == JOINED
    assert stores[3].join(1, 3) == JOINED


def test_every_run_of_a_job_finds_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv(secrets.VARIABLE, "known to the job only")
    monkeypatch.setattr("bapipe.job.rendezvous._num_opened", Counter())
    first = [open_store(index, NAMES, 20.0) for index in (0, 1)]
    early: list[JobStore] = []
    rank = threading.Thread(target=lambda: early.append(open_store(1, NAMES, 20.0)))
    rank.start()  # before rank 0 has the second run's server
    rank.join(0.5)
    late = open_store(0, NAMES, 20.0)
    rank.join(20)
    assert [store.add("failed", 1) for store in (*first, *early, late)] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("address", "port"),
    [
        (None, "29500"), ("127.0.0.1", None), ("127.0.0.1", "any"), ("127.0.0.1", "0"), ("127.0.0.1", "99999"),
        ("a..b", "29500"), ("x" * 70, "29500"),
    ],
)  # fmt: skip
def test_a_job_without_an_address_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, address: str | None, port: str | None
) -> None:
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(BapipeError) as caught:
        open_store(1, NAMES, 5.0)
    assert str(caught.value) == (
        "RANK and WORLD_SIZE say that this process is a rank of a job, but "
        f"MASTER_ADDR is '{address or ''}' and MASTER_PORT '{port or ''}', not a host and a port from 1 to 65535: start "
        "the job with torchrun, which sets all four, or unset RANK to run alone"
    )


def test_a_rank_that_the_job_does_not_have_is_refused_in_a_line() -> None:
    with pytest.raises(BapipeError) as caught:
        open_store(5, NAMES, 5.0)
    assert str(caught.value) == (
        "RANK is 5 and WORLD_SIZE 3: a job numbers its ranks from 0; start it with torchrun, which sets both, or unset "
        "RANK to run alone"
    )


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (
            0,
            "rank 0 (cpu0) cannot reach its own store at MASTER_ADDR 'no-such-host.invalid', port 29555: {}: set "
            "MASTER_ADDR to a name or an address of the host of rank 0 for all ranks",
        ),
        (
            1,
            "rank 1 (gpu1) cannot reach rank 0 at MASTER_ADDR 'no-such-host.invalid', port 29555, after 0.2 s: {}: "
            "start all ranks, and let this one through",
        ),
    ],
)
def test_an_address_that_nobody_has_is_named_with_the_systems_reason(
    monkeypatch: pytest.MonkeyPatch, rank: int, said: str
) -> None:
    reason = "Name or service not known"
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror(socket.EAI_NONAME, reason)))
    monkeypatch.setattr(rendezvous, "_OWN_S", 0.2)
    monkeypatch.setattr(rendezvous, "_listener_on_all", lambda port: socket.create_server(("127.0.0.1", 0)))
    for name, value in (
        ("MASTER_ADDR", "no-such-host.invalid"),
        ("MASTER_PORT", "29555"),
        (secrets.VARIABLE, "t" * 16),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(RunFailed) as caught:
        open_store(rank, NAMES, 0.2 if rank else 600.0)
    assert str(caught.value) == said.format(reason)


def test_the_store_is_there_until_all_ranks_have_read_why_the_job_ends(server: StoreServer) -> None:
    """Over a slow link that takes longer than on the host of rank 0."""
    stores = [JobStore(("127.0.0.1", server.port), SECRET, 20.0) for _ in range(2)]
    for rank, store in enumerate(stores):
        assert store.join(rank, len(stores)) == JOINED
    stores[0].server = server
    read: list[bytes] = []

    def slowly() -> None:
        for key in ("why", "when"):
            time.sleep(0.3)
            read.append(stores[1].get(key))
        stores[1]._channel.connection.close()

    def end() -> None:
        stores[0].set("why", "ranks differ")
        stores[0].set("when", "now")
        with stores[0].in_use():
            raise BapipeError("ranks differ")

    other = threading.Thread(target=slowly)
    other.start()
    start_s = time.monotonic()
    with pytest.raises(BapipeError, match="ranks differ"):
        end()
    assert read == [b"ranks differ", b"now"]
    assert time.monotonic() - start_s < 5
    other.join(20)


def test_a_rank_that_no_longer_asks_is_not_waited_for(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs, or the link to it is cut."""
    monkeypatch.setattr(job_server, "_QUIET_S", 0.1)
    stores = [JobStore(("127.0.0.1", server.port), SECRET, 20.0) for _ in range(2)]
    for rank, store in enumerate(stores):
        assert store.join(rank, len(stores)) == JOINED
    start_s = time.monotonic()
    server.wait_for_others(0)
    assert 0.05 < time.monotonic() - start_s < 5


def test_a_second_job_at_the_port_is_told_so(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BapipeError) as caught:
        open_store(0, NAMES, 5.0)
    assert str(caught.value) == (
        f"port {server.port} of 127.0.0.1 is in use, perhaps by another job: choose another MASTER_PORT for this one"
    )
    first = open_store(1, NAMES, 5.0)
    with pytest.raises(BapipeError) as caught:
        open_store(1, NAMES, 5.0)
    assert str(caught.value) == (
        f"rank 1 (gpu1) has joined the job at 127.0.0.1:{server.port} already, as another process: choose another "
        "MASTER_PORT for another job"
    )
    monkeypatch.setenv(secrets.VARIABLE, "known to another job")
    with pytest.raises(
        BapipeError, match=rf"^rank 2 \(gpu2\) and what it finds at 127.0.0.1:{server.port} do not have the same secret"
    ):
        open_store(2, NAMES, 5.0)
    assert first.add("still here", 1) == 1


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            f"{OTHER_VERSION}9.9",
            BapipeError,
            f"rank 1 (gpu1) runs bapipe {own_version()}, but rank 0 bapipe 9.9: install the same one everywhere",
        ),
        (
            TAKEN,
            BapipeError,
            "rank 1 (gpu1) has joined the job at host:29500 already, as another process: choose another MASTER_PORT for "
            "another job",
        ),
        (
            COMPLETE,
            RunFailed,
            "rank 1 (gpu1) finds a job at host:29500 that has had all of its ranks, for 2.5 s: end what is left of it, "
            "or choose another MASTER_PORT for another job",
        ),
    ],
)
def test_a_rank_that_may_not_join_is_told_why(answer: str, kind: type[BapipeError], message: str) -> None:
    refusal = _refusal(answer, "rank 1 (gpu1)", "host:29500", 2.5)
    assert type(refusal) is kind
    assert str(refusal) == message


def test_strangers_neither_join_nor_hinder_the_job(server: StoreServer, store: JobStore) -> None:
    """Connections with garbage, half an answer, a wrong answer, or nothing, far more than may be greeted at once."""
    store.set("key", b"value")
    strangers = []
    for number in range(200):
        stranger = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        strangers.append(stranger)
        if number % 4 == 0:
            stranger.sendall(os.urandom(5000))
        elif number % 4 == 1:
            stranger.sendall(b"x" * 20)
        elif number % 4 == 2:
            stranger.sendall(bytes(64))
    assert JobStore(("127.0.0.1", server.port), SECRET, 20.0).get("key") == b"value"
    assert store.num_keys() == 1
    challenge_only = []
    for stranger in strangers[:3]:  # a wrong answer, and the connections that came before most others, are ended
        received = b""
        try:
            while block := stranger.recv(4096):
                received += block
        except ConnectionResetError:
            pass
        challenge_only.append(len(received) <= 32)
    assert challenge_only == [True] * 3
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(("max_greetings", "greeting_s", "num_strangers"), [(4, 1000.0, 5), (10**6, 0.1, 1)])
def test_too_many_strangers_and_too_slow_ones_are_sent_away(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, max_greetings: int, greeting_s: float, num_strangers: int
) -> None:
    """Each defence without the other; the first stranger, who says nothing, finds the connection closed."""
    monkeypatch.setattr("bapipe.job.server._MAX_GREETINGS", max_greetings)
    monkeypatch.setattr("bapipe.job.server.GREETING_S", greeting_s)
    address = ("127.0.0.1", server.port)
    strangers = [socket.create_connection(address, timeout=10) for _ in range(num_strangers)]
    received = b"".join(iter(lambda: strangers[0].recv(64), b""))
    assert len(received) in (0, 32)  # the challenge alone, if it was sent before
    for stranger in strangers:
        stranger.close()


def test_a_value_is_changed_only_if_it_is_the_expected_one(store: JobStore) -> None:
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "another", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.get("key") == b"second"


def test_a_secret_that_is_short_or_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secrets.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    job_secret()
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    with pytest.raises(BapipeError, match=r"job-secret: the job's secret can be read or changed by others"):
        job_secret()
    monkeypatch.undo()
    monkeypatch.delenv(secrets.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "bapipe" / "job-secret").write_bytes(b"short")
    with pytest.raises(BapipeError, match=r"job-secret: a secret of 5 characters is too short: remove it"):
        job_secret()


def test_an_answer_to_a_peer_is_of_its_group_and_its_direction() -> None:
    """A stranger could pass on an answer of another group, or send a rank's own challenge back to it."""
    groups: list[Any] = [SimpleNamespace(group_name=name) for name in ("0", "1")]
    challenge = bytes(32)
    answers = {_answer(SECRET, group, *ranks, challenge) for group in groups for ranks in ((0, 1), (1, 0))}
    assert len(answers) == 4


def test_the_users_secret_is_made_once_and_kept_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secrets.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    made = job_secret()
    path = tmp_path / "bapipe" / "job-secret"
    assert len(made) == 64
    assert job_secret() == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    path.chmod(0o644)
    with pytest.raises(BapipeError, match=r"job-secret: the job's secret can be read or changed by others"):
        job_secret()
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    with pytest.raises(BapipeError) as caught:
        job_secret()
    assert str(caught.value) == (
        "/proc/nowhere/bapipe/job-secret: the job's secret cannot be kept there: No such file or directory; set "
        "BAPIPE_JOB_SECRET to the same random text for all ranks"
    )
    monkeypatch.setenv(secrets.VARIABLE, "sixteen letters.")
    assert job_secret() == b"sixteen letters."
    monkeypatch.setenv(secrets.VARIABLE, "fifteen letters")
    with pytest.raises(BapipeError, match=r"^BAPIPE_JOB_SECRET has 15 characters, .* at least 16 for all ranks"):
        job_secret()


def test_a_rank_that_is_refused_ends_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which serves the store; it waits until both others know."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, secrets.VARIABLE: "j" * 16}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    said: list[str] = []

    def join(index: int) -> None:
        with pytest.raises(Refused) as caught:
            wait_for_all(open_store(index, NAMES, 20.0), index, NAMES, 20.0, FACTS)
        said.append(str(caught.value))

    others = [threading.Thread(target=join, args=(index,)) for index in (1, 2)]
    for other in others:
        other.start()
    with pytest.raises(BapipeError, match=r"^no such plan"), refusals_told(20.0):
        raise BapipeError("no such plan")
    for other in others:
        other.join(20)
    assert [said.pop() for _ in others] == [f"rank 0 on {socket.gethostname()} is refused: no such plan"] * 2
    with pytest.raises(RunFailed), refusals_told(20.0):  # in the job, whose ranks know: it tells nobody
        raise RunFailed("a rank died")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(BapipeError), refusals_told(20.0):  # all ranks are here: torchrun ends them
        raise BapipeError("no such plan")


def test_a_rank_with_another_version_is_refused_and_all_ranks_say_both(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions are those of distributions, of which a process has one: here what the joining side says is changed."""
    assert store.join(0, 3) == JOINED
    monkeypatch.setattr("bapipe.job.store.own_version", lambda: "0.1.7")
    monkeypatch.setattr("bapipe.job.rendezvous.own_version", lambda: "0.1.7")
    said = rf"rank 1 \(gpu1\) runs bapipe 0\.1\.7, but rank 0 bapipe {re.escape(version('bapipe'))}: install the same"
    with pytest.raises(BapipeError, match=said):
        open_store(1, NAMES, 20.0)
    with pytest.raises(Refused, match=said):
        wait_for_all(store, 0, NAMES, 20.0, FACTS)


def test_a_process_of_another_start_with_another_version_is_refused_alone(
    server: StoreServer, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds its rank taken, or all ranks there: the job knows nothing of it, whether it waits for ranks or trains."""
    ranks = [store, *(JobStore(("127.0.0.1", server.port), SECRET, 20.0) for _ in (1, 2))]
    assert [ranks[rank].join(rank, 3) for rank in (0, 1)] == [JOINED, JOINED]
    with monkeypatch.context() as upgraded:
        upgraded.setattr("bapipe.job.store.own_version", lambda: "9.9")
        with pytest.raises(BapipeError, match=r"^rank 1 \(gpu1\) has joined the job at .* already, as another process"):
            open_store(1, NAMES, 20.0)
    assert ranks[2].join(2, 3) == JOINED
    ranks[1].leave()
    wait_until_left(store, {0, 2})
    with monkeypatch.context() as upgraded:
        upgraded.setattr("bapipe.job.store.own_version", lambda: "9.9")
        with pytest.raises(RunFailed, match=r"^rank 1 \(gpu1\) finds a job at .* that has had all of its ranks"):
            open_store(1, NAMES, 0.2)
    assert not store.check([REFUSED])


def test_a_rank_that_does_not_say_its_version_joins_and_is_told_what_differs(
    server: StoreServer, store: JobStore
) -> None:
    """As ranks of earlier versions join: they know no answer that names versions."""
    earlier = JobStore(("127.0.0.1", server.port), SECRET, 20.0)
    assert [store.join(0, 2), earlier._ask("join", 1, 2)] == [JOINED, JOINED]
    earlier.set("here1", msgspec.json.encode({"bapipe": "0.1.9", **FACTS}))
    with pytest.raises(BapipeError, match=r"bapipe is 0\.2\.0 on rank 0 \(cpu0\), but 0\.1\.9 on rank 1 \(gpu1\)$"):
        wait_for_all(store, 0, NAMES[:2], 20.0, {"bapipe": "0.2.0", **FACTS})
