"""The rendezvous of a job of torchrun or Slurm: ranks meet in a store, compare what they run, and note a failure."""

import errno
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from threading import Thread

import msgspec
from torch.distributed import PrefixStore, TCPStore

from bapipe.errors import BapipeError, RunFailed, first_line
from bapipe.job.interfaces import is_loopback
from bapipe.job.messages import NotOfTheJob
from bapipe.job.secret import VARIABLE, job_secret, secret_path
from bapipe.job.server import COMPLETE, JOINED, OTHER_VERSION, TAKEN, StoreServer, own_version
from bapipe.job.store import JobStore

_SETTLE_S = 0.7
"""How long a rank that lost its peer waits for another rank to report the cause."""

_ANSWER_S = 2.0
"""How long the store may take to answer; without an answer its host, or the link to it, is gone."""

_ASK_AGAIN_S = 0.05

_OLD_PORT_S = 5.0
"""How long another job may answer at the port that rank 0 of an earlier start has noted."""

_OWN_S = 30.0
"""How long rank 0 tries to reach its own store: the name of a host may become known only some time after its start."""

REFUSED, HEARD = "refused", "heard"
"""Keys of the store: why a rank does not join, and, with a rank's number, that it knows."""


class Refused(RunFailed):
    """A rank of the job was refused before it joined; `told` if another one of the same host says so."""


_PORT = re.compile(r"[0-9]{1,5}")

_num_opened: Counter[int] = Counter()
"""How many stores this process has opened by torchrun's agent, by rank."""


def open_store(index: int, names: Sequence[str], timeout_s: float) -> JobStore:
    """Returns the store of the job that this process is part of, as the environment variables of torchrun say.

    Rank 0 serves it at MASTER_ADDR. Under torchrun, whose agent has a store of its own at MASTER_PORT, that store only
    tells the other ranks the port of this one.

    Raises:
        BapipeError: the job has no such rank, the address is not set, the port is taken, or the server does not know
            the job's secret, or runs another version of bapipe.
        RunFailed: there is no answer for `timeout_s`.
    """
    with ExitStack() as serving:
        store = _joined_store(index, names, timeout_s, serving)
        serving.pop_all()  # until the job ends; after an error the port is free at once
    return store


def _joined_store(index: int, names: Sequence[str], timeout_s: float, serving: ExitStack) -> JobStore:
    """Returns the store as `open_store`; `serving` closes it."""
    if index >= len(names):
        raise BapipeError(
            f"RANK is {index} and WORLD_SIZE {len(names)}: a job numbers its ranks from 0; start it with torchrun, "
            "which sets both, or unset RANK to run alone"
        )
    place, secret = _Place(*_master()), job_secret()
    is_under_agent = "TORCHELASTIC_RESTART_COUNT" in os.environ
    title = f"rank {index} ({names[index]})"
    now_s = time.monotonic()
    limits = _Limits(
        answer_s=timeout_s,
        end_s=now_s + (min(timeout_s, _OWN_S) if index == 0 else timeout_s),
        others_end_s=now_s + (_OLD_PORT_S if is_under_agent and index > 0 else 0.0),
    )
    server: StoreServer | None = None
    try:
        if index == 0:  # under torchrun its agent has the port
            server = serve(place.address, 0 if is_under_agent else place.port, secret)
            serving.callback(server.close)
        if is_under_agent:
            _num_opened[index] += 1
            prefix = f"bapipe{len(names)}run{_num_opened[index]}"
            place.agent = _store_of_agent(place.address, place.port, prefix, server, timeout_s)
        store, answer = _join_until_answered(index, len(names), place, secret, limits)
    except NotOfTheJob:
        raise BapipeError(
            f"{title} and what it finds at {place} do not have the same secret, so that is another job, or "
            f"another user's: choose another MASTER_PORT, or set {VARIABLE} to the same text for all ranks, or give "
            f"their hosts the same {secret_path()}"
        ) from None
    except (OSError, RuntimeError) as error:
        raise _unreachable(error, index, title, place, timeout_s) from None
    store.server = server
    if answer == JOINED:
        return store
    refusal = _refusal(answer, title, place, timeout_s)
    if answer.startswith(OTHER_VERSION):
        store.set(REFUSED, str(refusal))
        store.set(f"{HEARD}{index}", "")
    store.leave()
    raise refusal


@dataclass(slots=True)
class _Place:
    """Where the store of a job is found.

    Attributes:
        port: under torchrun that of its agent, until the agent's store, `agent`, has told the store's own.
    """

    address: str
    port: int
    agent: PrefixStore | None = None

    def now(self) -> tuple[str, int]:
        """Returns the address and the port, which rank 0 may have noted anew."""
        if self.agent is not None:
            self.port = int(self.agent.get("port"))
        return self.address, self.port

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """How long a rank tries to join.

    Attributes:
        answer_s: how long the store may take to answer a request.
        end_s, others_end_s: until when, on the monotonic clock, there may be no answer, or one of another job.
    """

    answer_s: float
    end_s: float
    others_end_s: float


def _join_until_answered(index: int, size: int, place: _Place, secret: bytes, limits: _Limits) -> tuple[JobStore, str]:
    """Returns a connection to the store of the job at a place, and its answer to this rank.

    It asks until rank 0 has started, and what an earlier start of the job has left is gone.

    Raises:
        NotOfTheJob, OSError: another job answers, or nobody, for too long.
    """
    while True:
        try:
            store, answer = _join(index, size, place.now(), secret, limits.answer_s, limits.end_s)
        except NotOfTheJob:
            if time.monotonic() > limits.others_end_s:
                raise
        except OSError:
            if time.monotonic() > limits.end_s:
                raise
        else:
            if answer != COMPLETE or time.monotonic() > limits.end_s:
                return store, answer
            store.leave()
        time.sleep(_ASK_AGAIN_S)


def _unreachable(error: Exception, index: int, title: str, place: _Place, timeout_s: float) -> RunFailed:
    """Returns the error of a rank that finds no store, for which the system gives `error`."""
    reason = getattr(error, "strerror", None) or first_line(error)
    at = f"at MASTER_ADDR '{place.address}', port {place.port}"
    if index == 0:
        return RunFailed(
            f"{title} cannot reach its own store {at}: {reason}: set MASTER_ADDR to a name or an address of the host "
            "of rank 0 for all ranks"
        )
    return RunFailed(
        f"{title} cannot reach rank 0 {at}, after {timeout_s:g} s: {reason}: start all ranks, and let this one through"
    )


def _refusal(answer: str, title: str, place: object, timeout_s: float) -> BapipeError:
    """Returns the error of a rank whom the store of the job at a place does not let in; `answer` says why."""
    if answer.startswith(OTHER_VERSION):
        served = answer.removeprefix(OTHER_VERSION)
        return BapipeError(
            f"{title} runs bapipe {own_version()}, but rank 0 bapipe {served}: install the same one everywhere"
        )
    if answer == TAKEN:
        return BapipeError(
            f"{title} has joined the job at {place} already, as another process: choose another MASTER_PORT for "
            "another job"
        )
    return RunFailed(
        f"{title} finds a job at {place} that has had all of its ranks, for {timeout_s:g} s: end what is left of it, "
        "or choose another MASTER_PORT for another job"
    )


def _master() -> tuple[str, int]:
    """Returns MASTER_ADDR and MASTER_PORT, where the ranks of the job meet."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not _may_be_host(address) or not _PORT.fullmatch(port) or not 0 < int(port) < 2**16:
        raise BapipeError(
            f"RANK and WORLD_SIZE say that this process is a rank of a job, but MASTER_ADDR is '{address}' and "
            f"MASTER_PORT '{port}', not a host and a port from 1 to 65535: start the job with torchrun, which sets all "
            "four, or unset RANK to run alone"
        )
    return address, int(port)


def _may_be_host(address: str) -> bool:
    try:
        return bool(address.encode("idna"))
    except UnicodeError:  # as `getaddrinfo` would raise it: an empty part between dots, or one of 64 characters
        return False


def _store_of_agent(address: str, port: int, prefix: str, server: StoreServer | None, timeout_s: float) -> PrefixStore:
    """Returns the store of torchrun's agent, where rank 0 notes at which port it serves the job's store.

    It keeps what a start of the job that died has left (pytorch#135712), and nothing says which start this is: agents
    count their own restarts only. So ranks read the port again while nobody answers there, or another start of the job.
    Of several runs of one process each has its number.
    """
    agent = PrefixStore(prefix, TCPStore(address, port, None, False, timedelta(seconds=timeout_s)))
    if server is not None:
        agent.set("port", str(server.port))
    return agent


def serve(address: str, port: int, secret: bytes) -> StoreServer:
    """Returns a new server of a job's store, at an address of this host, or at all if other hosts reach it by another.

    That is so if the address is translated, or if it is a name that only this host takes for loopback, as Debian writes
    its own to /etc/hosts.

    Raises:
        BapipeError: another process uses the port.
    """
    try:
        return StoreServer(_listener(address, port), secret)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return StoreServer(_listener_on_all(port), secret)
        raise BapipeError(
            f"port {port} of {address} is in use, perhaps by another job: choose another MASTER_PORT for this one"
        ) from None


def _listener(address: str, port: int) -> socket.socket:
    family, _, _, _, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if ip_address(resolved[0]).is_loopback and address not in ("localhost", resolved[0]):
        return _listener_on_all(port)
    return socket.create_server(resolved, family=family, backlog=1024)


def _listener_on_all(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def _join(
    index: int, size: int, address: tuple[str, int], secret: bytes, timeout_s: float, end_s: float
) -> tuple[JobStore, str]:
    """Returns a connection to a job's store, and what that answers to a process that joins as a rank."""
    store = JobStore(address, secret, timeout_s, connect_s=max(1.0, end_s - time.monotonic()))
    try:
        return store, store.join(index, size)
    except OSError:
        store.leave()
        raise


def wait_for_all(store: JobStore, index: int, names: Sequence[str], timeout_s: float, facts: Mapping[str, str]) -> None:
    """Waits until every rank of the job has called it with the same `facts`, which are values by what they are of.

    Before torch's own rendezvous, which would say neither which rank is missing nor that one has failed.

    Raises:
        BapipeError: ranks differ.
        Refused: a rank was refused before it joined.
        RunFailed: some ranks have not called it after `timeout_s`, or one failed.
    """
    store.set(f"here{index}", msgspec.json.encode(facts))
    end_s = time.monotonic() + timeout_s
    keys = [f"here{other}" for other in range(len(names))]
    while not store.check(keys):  # all at once, as an answer over a slow link takes long
        if store.check([REFUSED]):
            store.set(f"{HEARD}{index}", "")
            raise Refused(store.get(REFUSED).decode(), told=os.environ.get("LOCAL_RANK", "0") != "0")
        if store.add("failed", 0):
            raise RunFailed(f"{_missing(store, keys, names)} did not join the job, of which a rank failed")
        if time.monotonic() > end_s:
            raise RunFailed(
                f"{_missing(store, keys, names)} did not join the job in {timeout_s:g} s: start all ranks, and see "
                "what ended them"
            )
        time.sleep(_ASK_AGAIN_S)
    known = [msgspec.json.decode(value, type=dict[str, str]) for value in store.multi_get(keys)]
    differences = _differences(names, known)
    if differences:
        raise BapipeError(f"the ranks differ, and would train something else: {'; '.join(differences)}")


def outer_address(store: JobStore) -> str:
    """Returns the address of this rank's host by which it is connected to other hosts; loopback if there are none.

    All ranks call it when they have joined.
    """
    if store.server is not None:
        store.set("outer address", store.server.outer_address())
    # Only on the host of rank 0 does a connection to the store not leave the host.
    address = store.own_address
    return (store.get("outer address").decode() or address) if is_loopback(address) else address


def _missing(store: JobStore, keys: Sequence[str], names: Sequence[str]) -> str:
    return ", ".join(f"rank {i} ({names[i]})" for i, is_there in enumerate(store.which(keys)) if not is_there)


def _differences(names: Sequence[str], known: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns who differs from rank 0 in what; ranks with the same value are named together."""
    found = []
    for what in dict.fromkeys(what for facts in known for what in facts):
        ranks_by_value: dict[str, list[str]] = {}
        for index, facts in enumerate(known):
            ranks_by_value.setdefault(facts.get(what, "none"), []).append(f"rank {index} ({names[index]})")
        if len(ranks_by_value) > 1:
            values = [f"{value} on {', '.join(ranks)}" for value, ranks in ranks_by_value.items()]
            found.append(f"{what} is {', but '.join(values)}")
    return found


@dataclass(frozen=True, slots=True)
class OtherRanks:
    """What the job's store says of the other ranks when this one has failed; nothing if it does not answer.

    Attributes:
        report: one of them reports the failure, so that this one need not.
        gone: those whose processes have ended without saying that they failed.
        silent: those that have neither ended nor failed.
    """

    report: bool = False
    gone: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()


def tell_failure(store: JobStore, index: int, size: int, lost_peer: bool) -> OtherRanks:
    """Notes that this rank of a job has failed; returns what is known of the others.

    A rank that only lost its peer waits a moment for the cause to be reported first.
    """
    found: list[OtherRanks] = []

    def ask() -> None:
        end_s = time.monotonic() + (_SETTLE_S if lost_peer else 0.0)
        with suppress(OSError):  # the store is gone, with the rank that hosted it
            store.set(f"failed{index}", "")
            while lost_peer and time.monotonic() < end_s and not store.add("failed", 0):
                time.sleep(_ASK_AGAIN_S)
            if store.add("failed", 1) > 1:
                found.append(OtherRanks(report=True))
                return
            joined, have_failed = store.joined(), store.which([f"failed{rank}" for rank in range(size)])
            others = [rank for rank in range(size) if rank != index and not have_failed[rank]]
            gone, silent = (tuple(rank for rank in others if (rank in joined) == is_in) for is_in in (False, True))
            found.append(OtherRanks(gone=gone, silent=silent))

    # In a thread: over a link that is cut the call would never return.
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SETTLE_S + _ANSWER_S)
    return found[0] if found else OtherRanks()
