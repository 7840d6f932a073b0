"""Longest paths through many actions: `longest_path.py` over arrays, in compiled code."""

from collections.abc import Sequence

import numpy as np

from bapipe.planner.compute.action_times import ActionGraph, run_actions, trace_back
from bapipe.planner.compute.arrays import Ints
from bapipe.planner.stages.longest_path import LongestPath
from bapipe.simulator.compiled import CompiledSchedule

SPEED_UP = 50
"""How many times as fast as in plain Python an action is timed, at least."""


class LongestPathOfMany(LongestPath):
    """The same graph and results as `LongestPath`."""

    def __init__(self, compiled: CompiledSchedule, queues: Sequence[bool]) -> None:
        super().__init__(compiled, queues)
        self.cost //= SPEED_UP
        # In the order of the fields of `ActionGraph`.
        columns = (
            compiled.ranks,
            compiled.durations,
            self._producer,
            compiled.channel_of,
            self._links,
            self._before_on_rank,
            self._before_on_link,
        )
        self._graph = ActionGraph(*(np.array(column, dtype=np.int64) for column in columns))
        # Written anew by every question.
        self._ends, self._arrivals = (np.zeros(len(compiled.actions), dtype=np.int64) for _ in range(2))
        self._rank_ends = np.zeros(compiled.num_ranks, dtype=np.int64)
        self._link_ends = np.zeros(len(compiled.links) + 1, dtype=np.int64)

    def find(
        self, duration_ns: Sequence[int], transfer_ns: Sequence[int], tail_ns: Sequence[int]
    ) -> tuple[int, list[int], list[int], int]:
        at, of_transfers, tails = (np.array(times, dtype=np.int64) for times in (duration_ns, transfer_ns, tail_ns))
        self._run_all(at[None], of_transfers[None], tails[None])
        length, rank = max(
            (int(self._ends[action]) + tail_ns[rank], rank) for rank, action in self.last_actions.items()
        )
        durations, transfers = np.zeros_like(at), np.zeros_like(of_transfers)
        last = self.last_actions[rank]
        trace_back(self._graph, last, at, of_transfers, self._ends, self._arrivals, durations, transfers)
        return length, durations.tolist(), transfers.tolist(), rank

    def lengths_cost(self, num: int) -> int:
        return num * self.cost

    def lengths(self, duration_ns: Ints, transfer_ns: Ints, tail_ns: Ints) -> Ints:
        return self._run_all(*(np.ascontiguousarray(times.T) for times in (duration_ns, transfer_ns, tail_ns)))

    def _run_all(self, duration_ns: Ints, transfer_ns: Ints, tail_ns: Ints) -> Ints:
        """Returns the lengths for n vectors of times; `_ends` and `_arrivals` are then those of the last. [n, ...]"""
        lengths = np.zeros(len(tail_ns), dtype=np.int64)
        written = self._rank_ends, self._link_ends, self._ends, self._arrivals
        run_actions(self._graph, duration_ns, transfer_ns, tail_ns, *written, lengths)
        return lengths
