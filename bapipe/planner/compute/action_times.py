"""When the actions and transfers of a step end, and which of them follow one another without a gap, compiled.

For `planner/stages/longest_path.py`, which has the rules; arrays in place of its lists.
"""

from typing import NamedTuple

from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.compiled import compiled


class ActionGraph(NamedTuple):
    """The actions of a schedule, in a sequence in which each comes after all that it depends on. All are [actions].

    Attributes:
        ranks: where each runs.
        durations: the index of its time.
        producers: the action that makes what it consumes; -1 without one.
        channels: the channel that carries what it makes; -1 if that stays on its device.
        links: the link on which that waits for earlier transfers; -1 if it does not.
        before_on_rank, before_on_link: the action before it on its rank, and the one whose transfer used its link
            before; -1 without one.
    """

    ranks: Ints
    durations: Ints
    producers: Ints
    channels: Ints
    links: Ints
    before_on_rank: Ints
    before_on_link: Ints


@compiled
def run_actions(
    graph: ActionGraph,
    duration_ns: Ints,
    transfer_ns: Ints,
    tail_ns: Ints,
    rank_ends: Ints,
    link_ends: Ints,
    ends: Ints,
    arrivals: Ints,
    lengths: Ints,
) -> None:
    """Says when a step ends with each of n vectors of times, and with the last of them when everything in it does.

    Args:
        duration_ns: [n, durations]
        transfer_ns: [n, channels]
        tail_ns: what follows the last action of a rank; 0 on ranks without any. [n, ranks]
        rank_ends, link_ends: scratch. [ranks], [links]
        ends, arrivals: filled: when each action ends, and when what it makes arrives, in ns. [actions]
        lengths: filled: when the step ends, in ns. [n]
    """
    for i in range(len(lengths)):
        rank_ends[:] = 0
        link_ends[:] = 0
        for action in range(len(graph.ranks)):
            rank, producer, channel = graph.ranks[action], graph.producers[action], graph.channels[action]
            end = rank_ends[rank]
            if producer >= 0:
                end = max(end, arrivals[producer])
            end += duration_ns[i, graph.durations[action]]
            rank_ends[rank] = end
            ends[action] = end
            if channel >= 0:
                link = graph.links[action]
                if link >= 0:
                    end = max(end, link_ends[link])
                end += transfer_ns[i, channel]
                if link >= 0:
                    link_ends[link] = end
            arrivals[action] = end
        lengths[i] = 0
        for rank in range(len(rank_ends)):
            lengths[i] = max(lengths[i], rank_ends[rank] + tail_ns[i, rank])


@compiled
def trace_back(
    graph: ActionGraph,
    last: int,
    duration_ns: Ints,
    transfer_ns: Ints,
    ends: Ints,
    arrivals: Ints,
    durations: Ints,
    transfers: Ints,
) -> None:
    """Counts the times on the longest path that ends with the action `last`.

    Args:
        duration_ns, transfer_ns: [durations], [channels]
        ends, arrivals: as `run_actions` has filled them with these times. [actions]
        durations, transfers: how often the path contains each; zeros before. [durations], [channels]
    """
    action = last
    while action >= 0:
        duration = graph.durations[action]
        durations[duration] += 1
        start = ends[action] - duration_ns[duration]
        before = graph.before_on_rank[action]
        if before >= 0 and ends[before] == start:
            action = before
            continue
        # The action waited for its message: go back over the transfers that queued on the link without a gap.
        action = graph.producers[action]
        while action >= 0 and graph.channels[action] >= 0:
            channel = graph.channels[action]
            transfers[channel] += 1
            if arrivals[action] - transfer_ns[channel] == ends[action]:
                break
            action = graph.before_on_link[action]
