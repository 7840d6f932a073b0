"""The longest path through the actions and transfers of a compiled schedule, and how often it contains each of them.

The edges of the graph do not depend on the layers of the stages. An action starts after the previous action of its
device, and after its message has arrived. A message arrives after the action that produces it and its own transfer and,
if transfers queue, after the previous transfer on its link. All transfers of a link come from one device, so they
become ready, and take the link, in the order of that device's actions. After its last action a device has a *tail*: the
all-reduces and updates of its stages.
"""

from collections.abc import Sequence

import numpy as np

from bapipe.planner.compute.arrays import Ints
from bapipe.simulator.compiled import CompiledSchedule

NONE = -1
"""Stands for no action, or no link."""

MIN_COMPILED = 1_500
"""The number of actions from which on compiled code is worth the half second that numba takes to import."""

COLUMNS_COST = 3
"""How many paths take as long as the lengths of hundreds at once."""


def make_longest_path(compiled: CompiledSchedule, queues: Sequence[bool]) -> "LongestPath":
    """Returns the graph of a schedule, with compiled code if there are many actions."""
    if len(compiled.actions) < MIN_COMPILED:
        return LongestPath(compiled, queues)
    from bapipe.planner.stages.longest_path_of_many import LongestPathOfMany

    return LongestPathOfMany(compiled, queues)


class LongestPath:
    """The graph of a compiled schedule; every rank runs one action at a time.

    In plain Python, which is fast enough for thousands of actions: `LongestPathOfMany` has the same in arrays.

    Attributes:
        last_actions: the last action of each rank that has any.
        cost: what `find` costs, in actions of the plain engine.
    """

    def __init__(self, compiled: CompiledSchedule, queues: Sequence[bool]) -> None:
        """`queues` says for each channel whether its transfers wait for earlier ones on their link. [channels]"""
        self.compiled = compiled
        # For each action: the previous one on its rank, the previous one whose transfer uses its link, the action that
        # produces its message, and the link of its transfer. [actions]
        self._before_on_rank: list[int] = []
        self._before_on_link: list[int] = []
        self._producer: list[int] = []
        self._links: list[int] = []
        last_on_rank: dict[int, int] = {}
        last_on_link: dict[int, int] = {}
        produced_by: dict[int, int] = {}
        columns = zip(compiled.ranks, compiled.consumes, compiled.produces, compiled.channel_of, strict=True)
        for action, (rank, consumes, produces, channel) in enumerate(columns):
            self._before_on_rank.append(last_on_rank.get(rank, NONE))
            self._producer.append(produced_by.get(consumes, NONE))
            last_on_rank[rank] = produced_by[produces] = action
            link = compiled.channel_links[channel] if channel >= 0 and queues[channel] else NONE
            self._links.append(link)
            self._before_on_link.append(NONE if link == NONE else last_on_link.get(link, NONE))
            if link != NONE:
                last_on_link[link] = action
        self.last_actions = last_on_rank
        self.cost = len(compiled.actions)

    def find(
        self, duration_ns: Sequence[int], transfer_ns: Sequence[int], tail_ns: Sequence[int]
    ) -> tuple[int, list[int], list[int], int]:
        """Returns the length of the longest path in ns, how often it contains each duration, the same for transfers.

        Last comes the rank on which the path ends, whose tail is part of its length. O(actions).

        Args:
            duration_ns: the time of an action, indexed by its entry in `CompiledSchedule.durations`. [durations]
            transfer_ns: the time of one transfer. [channels]
            tail_ns: what follows the last action. [ranks]
        """
        ends, arrivals = self._run(duration_ns, transfer_ns)
        length, rank = max((ends[action] + tail_ns[rank], rank) for rank, action in self.last_actions.items())
        durations, transfers = self._trace_back(self.last_actions[rank], ends, arrivals, duration_ns, transfer_ns)
        return length, durations, transfers, rank

    def _run(self, duration_ns: Sequence[int], transfer_ns: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns when each action ends, and when what it produces arrives, in ns. [actions], [actions]"""
        compiled = self.compiled
        ends: list[int] = []
        arrivals: list[int] = []
        append_end, append_arrival = ends.append, arrivals.append
        rank_ends = [0] * compiled.num_ranks
        link_ends = [0] * (len(compiled.links) + 1)
        for rank, producer, duration, channel, link in zip(
            compiled.ranks, self._producer, compiled.durations, compiled.channel_of, self._links, strict=True
        ):
            end = rank_ends[rank]
            if producer >= 0 and arrivals[producer] > end:
                end = arrivals[producer]
            end += duration_ns[duration]
            rank_ends[rank] = end
            append_end(end)
            if channel < 0:
                append_arrival(end)
            elif link < 0:
                append_arrival(end + transfer_ns[channel])
            else:
                free = link_ends[link]
                arrival = (free if free > end else end) + transfer_ns[channel]
                link_ends[link] = arrival
                append_arrival(arrival)
        return ends, arrivals

    def lengths_cost(self, num: int) -> int:
        """Returns what `lengths` costs for `num` columns of times, up to hundreds, in actions of the plain engine."""
        return COLUMNS_COST * self.cost

    def lengths(self, duration_ns: Ints, transfer_ns: Ints, tail_ns: Ints) -> Ints:
        """Returns the lengths of the longest paths for n columns of times; see `find`.

        [durations, n], [channels, n], [ranks, n] -> [n]
        """
        compiled = self.compiled
        rank_ends, arrivals = list(np.zeros_like(tail_ns)), list[Ints]()
        link_ends = list(np.zeros((len(compiled.links) + 1, tail_ns.shape[1]), dtype=np.int64))
        for rank, producer, duration, channel, link in zip(
            compiled.ranks, self._producer, compiled.durations, compiled.channel_of, self._links, strict=True
        ):
            start = rank_ends[rank] if producer < 0 else np.maximum(rank_ends[rank], arrivals[producer])
            rank_ends[rank] = arrival = start + duration_ns[duration]
            if link >= 0:
                arrival = link_ends[link] = np.maximum(link_ends[link], arrival) + transfer_ns[channel]
            elif channel >= 0:
                arrival = arrival + transfer_ns[channel]
            arrivals.append(arrival)
        ends = [rank_ends[rank] + tail_ns[rank] for rank in self.last_actions]
        longest: Ints = np.maximum.reduce(ends)
        return longest

    def _trace_back(
        self,
        last: int,
        ends: Sequence[int],
        arrivals: Sequence[int],
        duration_ns: Sequence[int],
        transfer_ns: Sequence[int],
    ) -> tuple[list[int], list[int]]:
        """Returns how often the longest path that ends with action `last` contains each duration and transfer.

        [durations], [channels]
        """
        compiled = self.compiled
        durations, transfers = [0] * len(duration_ns), [0] * len(transfer_ns)
        action = last
        while action != NONE:
            durations[compiled.durations[action]] += 1
            start = ends[action] - duration_ns[compiled.durations[action]]
            before = self._before_on_rank[action]
            if before != NONE and ends[before] == start:
                action = before
                continue
            # The action waited for its message: go back over the transfers that queued on the link without a gap.
            action = self._producer[action]
            while action != NONE and compiled.channel_of[action] >= 0:
                channel = compiled.channel_of[action]
                transfers[channel] += 1
                if arrivals[action] - transfer_ns[channel] == ends[action]:
                    break
                action = self._before_on_link[action]
        return durations, transfers
