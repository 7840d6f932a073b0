"""The points of a sweep, searched in several processes: each chain of neighbouring points by one of them."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from bapipe.errors import BapipeError
from bapipe.formats.cache import load_plan, store_plan
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.hardware import num_cores
from bapipe.planner import nearby
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.plan import cached_plan_path, plan_cached
from bapipe.processes import ChildError, LocalProcess, blocked, local_processes, receive

MIN_POINTS = 12
"""Fewer points are searched in this process: others take a second to start."""

INTERRUPTED_S = 5.0
"""How long processes that are interrupted may take for the plans of the points that they have done."""

POLL_S = 0.02

Chain = Sequence[nearby.Point]
Plans = list[Plan | str | None]
"""A plan for each point of a chain, or the reason why there is none; None where an interruption came first."""


@dataclass(frozen=True, slots=True)
class _PointDone:
    """Message of a process that has searched another point."""


@dataclass(frozen=True, slots=True)
class _ChainDone:
    """Message of a process with the plans of a chain, or why there is none."""

    number: int
    plans: Plans


def plan_chains(
    profiles: ProfilesByKind,
    chains: Sequence[Chain],
    progress: Callable[[int], None],
    *,
    exact: bool,
    max_processes: int | None = None,
) -> list[Plans]:
    """Returns the plans of each chain, or the reason where there is none; the same with any number of processes.

    Ctrl-C ends the searches with the points that are done by then; the others are None.

    Args:
        progress: called with the number of points done.
        exact: search each point in full, with the bound and the plan of `plan_cached`.
        max_processes: else as many as cores, and one for few points.
    """
    done, num_points = 0, sum(map(len, chains))
    limit = max_processes or (num_cores() if num_points >= MIN_POINTS else 1)
    num_processes = min(limit, len(chains))

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done)

    progress(0)
    if num_processes <= 1:
        return _plan_chains(profiles, chains, exact, tick)
    plans: list[Plans] = [[] for _ in chains]
    arguments = dict(profiles), [list(chain) for chain in chains], exact, num_processes
    with (
        TemporaryDirectory(prefix="bapipe-") as folder,
        local_processes(_search, num_processes, arguments, folder=Path(folder)) as processes,
    ):
        is_complete = _receive_all(processes, plans, tick)
        ended = [] if all(plans) else [process.why_ended() for process in processes if process.exit_code(1.0)]
    if not is_complete:
        return [found or [None] * len(chain) for found, chain in zip(plans, chains, strict=True)]
    if not all(plans):
        raise BapipeError(
            f"a process of the sweep ended before its points were done: {', '.join(ended)}; the same command goes on "
            "there"
        )
    return plans


def _receive_all(processes: Sequence[LocalProcess], plans: list[Plans], tick: Callable[[], None]) -> bool:
    """Stores the plans of the chains, as far as they are done if Ctrl-C comes first; returns whether all are."""
    try:
        while any(process.is_open for process in processes):
            _receive(processes, plans, tick)
            time.sleep(POLL_S)  # Ctrl-C comes here, not in the middle of a message
    except KeyboardInterrupt:
        deadline = Deadline(INTERRUPTED_S)
        for process in processes:
            if process.is_open:
                process.ask_to_end()
        while not deadline.is_over and any(process.is_open for process in processes):
            _receive(processes, plans, tick)
            time.sleep(POLL_S)
        return False
    return True


def _receive(processes: Sequence[LocalProcess], plans: list[Plans], tick: Callable[[], None]) -> None:
    """Stores the plans that have arrived."""
    with blocked(signal.SIGINT):
        for _, message in receive([process for process in processes if process.is_open], timeout_s=0.0):
            if isinstance(message, _PointDone):
                tick()
            elif isinstance(message, _ChainDone):
                plans[message.number] = message.plans
            elif isinstance(message, ChildError):
                raise BapipeError(f"a process of the sweep failed: {message.text}")


def _search(
    index: int,
    send: Callable[[object], None],
    profiles: ProfilesByKind,
    chains: Sequence[Chain],
    exact: bool,
    num_processes: int,
) -> None:
    """Searches every so many-th chain; SIGTERM ends it with the points that are done."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # between two chains it waits for the next one
    signal.signal(signal.SIGTERM, _interrupt_once)

    def point_done() -> None:
        with blocked(signal.SIGTERM):  # not in the middle of a message
            send(_PointDone())

    for number in range(index, len(chains), num_processes):
        plans = _plan_chain_until_sigterm(profiles, chains[number], exact, point_done)
        send(_ChainDone(number, plans))
        if None in plans:
            return


def _plan_chain_until_sigterm(profiles: ProfilesByKind, chain: Chain, exact: bool, tick: Callable[[], None]) -> Plans:
    """Returns the plans of a chain while SIGTERM, which the caller has blocked, is let through."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        plans = _plan_chain(profiles, chain, exact, tick)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    except KeyboardInterrupt:  # right before the search, or right after it
        return [None] * len(chain)
    return plans


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _plan_chains(
    profiles: ProfilesByKind, chains: Sequence[Chain], exact: bool, tick: Callable[[], None]
) -> list[Plans]:
    """Returns the plans of chains that are searched in this process."""
    plans: list[Plans] = []
    for chain in chains:
        is_interrupted = any(None in found for found in plans)
        plans.append([None] * len(chain) if is_interrupted else _plan_chain(profiles, chain, exact, tick))
    return plans


def _plan_chain(profiles: ProfilesByKind, chain: Chain, exact: bool, tick: Callable[[], None]) -> Plans:
    """Returns the plans of a chain, of which Ctrl-C leaves some out."""
    try:
        return _search_chain(profiles, chain, exact, tick)
    except KeyboardInterrupt:
        return [None] * len(chain)


def _search_chain(profiles: ProfilesByKind, chain: Chain, exact: bool, tick: Callable[[], None]) -> Plans:
    """Returns the plans of a chain from the cache, or searches them together."""
    known = [None if exact else _cached(profiles, point) for point in chain]
    plans = [plan for plan in known if plan is not None]
    if len(plans) == len(chain):
        for _ in chain:
            tick()
        return list(plans)
    found: Plans = [None] * len(chain)
    if exact or not nearby.can_plan_nearby(profiles, chain):
        _search_rest(profiles, chain, found, tick)
        return found
    so_far: dict[int, Callable[[], Plan | None]] = {}

    def point_done(number: int, plan: Callable[[], Plan | None]) -> None:
        so_far[number] = plan
        tick()

    try:
        searched = nearby.plans_nearby(profiles, chain, point_done)
    except KeyboardInterrupt:
        return [so_far[number]() if number in so_far else None for number in range(len(chain))]
    for number, plan in enumerate(searched):
        if isinstance(plan, Plan):
            store_plan(_path(profiles, chain[number]), plan)
            found[number] = plan
    _search_rest(profiles, chain, found, lambda: None)
    return found


def _search_rest(profiles: ProfilesByKind, chain: Chain, found: Plans, tick: Callable[[], None]) -> None:
    """Searches those points of a chain in full that have no plan yet, in place, until Ctrl-C."""
    try:
        for number, point in enumerate(chain):
            if found[number] is None:
                found[number] = _searched_in_full(profiles, point)
                tick()
    except KeyboardInterrupt:
        return


def _cached(profiles: ProfilesByKind, point: nearby.Point) -> Plan | None:
    """Returns a plan of a full search, or else of a sweep, that is in the cache."""
    in_full = load_plan(cached_plan_path(tuple(profiles.values()), point.cluster, point.options))
    return in_full or load_plan(_path(profiles, point))


def _path(profiles: ProfilesByKind, point: nearby.Point) -> Path:
    limits = {"max_gap": nearby.MAX_GAP, "max_nodes": nearby.MAX_NODES}
    return cached_plan_path(tuple(profiles.values()), point.cluster, point.options, **limits)


def _searched_in_full(profiles: ProfilesByKind, point: nearby.Point) -> Plan | str:
    try:
        return plan_cached(tuple(profiles.values()), point.cluster, point.options)
    except BapipeError as error:
        return str(error)
