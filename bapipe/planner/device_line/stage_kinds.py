"""Sums over layers on the kinds of devices that the stages of a line have, and those before and behind them."""

from dataclasses import dataclass

import numpy as np

from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.device_line.layer_sums import LayerSums, TimeSums


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSums:
    """Sums over layers of a stage on the kinds of its devices, those with the devices before it, and behind it.

    A stage that begins later gains no more time for the layers before it than it loses, as its kinds are among those
    that they count on.
    """

    own: TimeSums
    before: TimeSums
    behind: TimeSums


class StageKinds:
    """The kinds of devices of stages by their first device and the most devices of their class.

    With more devices a stage has the same kinds, in the order in which they come, and maybe one more: so numbers say
    which they are.
    """

    def __init__(self, sums: LayerSums, most: IntArray) -> None:
        """`most` are the devices of stages of each class, at most. [groups]"""
        self._sums, num = sums, sums.num_devices
        kind_of = [device.kind for device in sums.line.cluster.devices[:num]]
        self._kinds = sorted(set(kind_of))
        self._next = np.full((len(self._kinds), num + 1), num)  # the next device of each kind. [kinds, positions]
        for k, kind in enumerate(self._kinds):
            for position in range(num - 1, -1, -1):
                self._next[k, position] = position if kind_of[position] == kind else self._next[k, position + 1]
        ends = np.minimum(np.arange(num)[:, None] + most, num)
        self._num_own, self._num_before = np.zeros_like(ends), np.zeros_like(ends)  # [positions, groups]
        for following in self._next:
            self._num_own += following[:-1, None] < ends
            self._num_before += following[0] < ends
        self._num_behind = (self._next < num).sum(axis=0)  # [positions]

    def sums(self, position: int, groups: IntArray) -> list[tuple[StageSums, IntArray]]:
        """Returns the sums of stages of some classes, each with the indices of its classes in `groups`."""
        own, before = self._num_own[position, groups], self._num_before[position, groups]
        changes = np.flatnonzero((np.diff(own) != 0) | (np.diff(before) != 0)) + 1
        behind = self._on_first(position, int(self._num_behind[position]))
        return [
            (
                StageSums(
                    own=self._on_first(position, int(own[columns[0]])),
                    before=self._on_first(0, int(before[columns[0]])),
                    behind=behind,
                ),
                columns,
            )
            for columns in np.split(np.arange(groups.size), changes)
        ]

    def _on_first(self, position: int, count: int) -> TimeSums:
        """The sums on the first kinds of devices from a position on."""
        nearest = np.argsort(self._next[:, position], kind="stable")[:count]
        return self._sums.on_kinds(self._kinds[k] for k in nearest.tolist())
