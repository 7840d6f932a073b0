"""The points of a sweep, searched in several processes: each chain of neighbouring points by one of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bapipe.errors import BapipeError
from bapipe.formats.cache import load_plan, store_plan
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.hardware import num_cores
from bapipe.planner import nearby
from bapipe.planner.plan import cached_plan_path, plan_cached
from bapipe.processes import ChildError, local_processes, receive

MIN_POINTS = 12
"""Fewer points are searched in this process: others take a second to start."""

Chain = Sequence[nearby.Point]


@dataclass(frozen=True, slots=True)
class _PointDone:
    """Message of a process that has searched another point."""


@dataclass(frozen=True, slots=True)
class _ChainDone:
    """Message of a process with the plans of a chain, or why there is none."""

    number: int
    plans: list[Plan | str]


def plan_chains(
    profiles: Mapping[str, ModelProfile],
    chains: Sequence[Chain],
    progress: Callable[[int], None],
    *,
    exact: bool,
    max_processes: int | None = None,
) -> list[list[Plan | str]]:
    """Returns the plans of each chain, or the reason where there is none; the same with any number of processes.

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
        return [_plan_chain(profiles, chain, exact, tick) for chain in chains]
    plans: list[list[Plan | str]] = [[] for _ in chains]
    arguments = dict(profiles), [list(chain) for chain in chains], exact, num_processes
    with (
        TemporaryDirectory(prefix="bapipe-") as folder,
        local_processes(_search, num_processes, arguments, folder=Path(folder)) as processes,
    ):
        while any(process.is_open for process in processes):
            for _, message in receive(processes, timeout_s=1.0):
                if isinstance(message, _PointDone):
                    tick()
                elif isinstance(message, _ChainDone):
                    plans[message.number] = message.plans
                elif isinstance(message, ChildError):
                    raise BapipeError(f"a process of the sweep failed: {message.text}")
    if not all(plans):
        raise BapipeError("a process of the sweep ended before its points were done; the same command goes on there")
    return plans


def _search(
    index: int,
    send: Callable[[object], None],
    profiles: Mapping[str, ModelProfile],
    chains: Sequence[Chain],
    exact: bool,
    num_processes: int,
) -> None:
    """Searches every so many-th chain."""
    for number in range(index, len(chains), num_processes):
        send(_ChainDone(number, _plan_chain(profiles, chains[number], exact, lambda: send(_PointDone()))))


def _plan_chain(
    profiles: Mapping[str, ModelProfile], chain: Chain, exact: bool, tick: Callable[[], None]
) -> list[Plan | str]:
    """Returns the plans of a chain from the cache, or searches them together."""
    known = [None if exact else _cached(profiles, point) for point in chain]
    plans = [plan for plan in known if plan is not None]
    if len(plans) == len(chain):
        for _ in chain:
            tick()
        return list(plans)
    if exact or not nearby.can_plan_nearby(profiles, chain):
        return [_searched_in_full(profiles, point, tick) for point in chain]
    found: list[Plan | str] = []
    for point, plan in zip(chain, nearby.plans_nearby(profiles, chain, tick), strict=True):
        if isinstance(plan, Plan):
            store_plan(_path(profiles, point), plan)
        found.append(plan if isinstance(plan, Plan) else _searched_in_full(profiles, point, lambda: None))
    return found


def _cached(profiles: Mapping[str, ModelProfile], point: nearby.Point) -> Plan | None:
    """Returns a plan of a full search, or else of a sweep, that is in the cache."""
    in_full = load_plan(cached_plan_path(tuple(profiles.values()), point.cluster, point.options))
    return in_full or load_plan(_path(profiles, point))


def _path(profiles: Mapping[str, ModelProfile], point: nearby.Point) -> Path:
    limits = {"max_gap": nearby.MAX_GAP, "max_nodes": nearby.MAX_NODES}
    return cached_plan_path(tuple(profiles.values()), point.cluster, point.options, **limits)


def _searched_in_full(
    profiles: Mapping[str, ModelProfile], point: nearby.Point, tick: Callable[[], None]
) -> Plan | str:
    try:
        return plan_cached(tuple(profiles.values()), point.cluster, point.options)
    except BapipeError as error:
        return str(error)
    finally:
        tick()
