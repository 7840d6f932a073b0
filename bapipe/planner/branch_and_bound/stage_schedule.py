"""How the devices of one stage take their turns: what a schedule's order of one stage asks of each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.schedules.table import Action, Phase

MemoryPeak = tuple[int, int, int]
"""Micro-batches between F and the end of their backward; those in their backward; those between I and the end of W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What one device of a stage does in a step.

    Attributes:
        num_microbatches: how many it runs.
        points: what it holds at the same time; none of them is below another.
    """

    num_microbatches: int
    points: tuple[MemoryPeak, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """An order of one stage, taken in turns by several devices.

    Attributes:
        shares: of each device.
        depth: F of micro-batch m + depth follows B or I of micro-batch m on the same device.
        ahead: F of micro-batch m + ahead comes before B or I of micro-batch m on the same device, while there are that
            many.
        phases: which there are.
        ends: the phases that can come last on a device: B, W, or both.
    """

    shares: tuple[ReplicaLoad, ...]
    depth: int
    ahead: int
    phases: frozenset[Phase]
    ends: frozenset[Phase]

    @property
    def num_microbatches(self) -> int:
        """How many there are."""
        return sum(share.num_microbatches for share in self.shares)

    @property
    def splits(self) -> bool:
        """Whether I and W run apart."""
        return Phase.INPUT_GRAD in self.phases

    @property
    def joins(self) -> bool:
        """Whether there is a B."""
        return Phase.BACKWARD in self.phases


def turns(order: Sequence[Action], num_devices: int) -> StageSchedule:
    """Returns how `num_devices` devices share the order of a stage. O(actions)."""
    parts = [[action for action in order if action.microbatch % num_devices == k] for k in range(num_devices)]
    depths = [_depths(part, num_devices) for part in parts]
    depth = max(max(own, default=1) for own in depths)
    least = min((found for own in depths for j, found in enumerate(own) if j + found < len(own)), default=depth)
    return StageSchedule(
        shares=tuple(
            ReplicaLoad(num_microbatches=sum(a.phase is Phase.FORWARD for a in part), points=_points(part))
            for part in parts
        ),
        depth=depth * num_devices,
        ahead=(least - 1) * num_devices,
        phases=frozenset(action.phase for action in order),
        ends=frozenset(part[-1].phase for part in parts if part),
    )


def _depths(order: Sequence[Action], num_devices: int) -> list[int]:
    """For every micro-batch of a device, how many of its F from its own on come before its B or I."""
    forwards = 0
    found: dict[int, int] = {}
    for _, phase, microbatch in order:
        if phase is Phase.FORWARD:
            forwards += 1
        elif phase is not Phase.WEIGHT_GRAD:
            found[microbatch] = max(1, forwards - microbatch // num_devices)
    return [found[microbatch] for microbatch in sorted(found)]


def _points(order: Sequence[Action]) -> tuple[MemoryPeak, ...]:
    kept = whole = left = 0
    seen: set[MemoryPeak] = set()
    for _, phase, _ in order:
        if phase is Phase.FORWARD:
            kept += 1
        elif phase is not Phase.WEIGHT_GRAD:
            whole += 1
            left += phase is Phase.INPUT_GRAD
        seen.add((kept, whole, left))
        if phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD):
            kept, whole = kept - 1, whole - 1
            left -= phase is Phase.WEIGHT_GRAD
    best: list[MemoryPeak] = []
    for point in sorted(seen, reverse=True):
        if not any(all(a <= b for a, b in zip(point, other, strict=True)) for other in best):
            best.append(point)
    return tuple(best)
