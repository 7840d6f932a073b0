"""When the actions and transfers of a step end, and which of them follow one another without a gap, compiled.

For `planner/stages/longest_path.py`, which has the rules; arrays in place of its lists.
"""

from typing import NamedTuple

from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.compiled import compiled, inlined


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


@inlined
def _run(
    graph: ActionGraph,
    duration_ns: Ints,
    transfer_ns: Ints,
    rank_ends: Ints,
    link_ends: Ints,
    ends: Ints,
    arrivals: Ints,
) -> None:
    rank_ends[:] = 0
    link_ends[:] = 0
    for action in range(len(graph.ranks)):
        rank, producer, channel = graph.ranks[action], graph.producers[action], graph.channels[action]
        end = rank_ends[rank]
        if producer >= 0:
            end = max(end, arrivals[producer])
        end += duration_ns[graph.durations[action]]
        rank_ends[rank] = end
        ends[action] = end
        if channel >= 0:
            link = graph.links[action]
            if link >= 0:
                end = max(end, link_ends[link])
            end += transfer_ns[channel]
            if link >= 0:
                link_ends[link] = end
        arrivals[action] = end


@compiled
def run_actions(
    graph: ActionGraph,
    duration_ns: Ints,
    transfer_ns: Ints,
    rank_ends: Ints,
    link_ends: Ints,
    ends: Ints,
    arrivals: Ints,
) -> None:
    """Says when each action ends, and when what it makes arrives, in ns.

    Args:
        duration_ns: [durations]
        transfer_ns: [channels]
        rank_ends: filled with the end of the last action. [ranks]
        link_ends: scratch. [links]
        ends, arrivals: filled. [actions]
    """
    _run(graph, duration_ns, transfer_ns, rank_ends, link_ends, ends, arrivals)


@compiled
def run_columns(
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
    """Says when a step ends with each of n vectors of times, in ns.

    Args:
        duration_ns: [n, durations]
        transfer_ns: [n, channels]
        tail_ns: what follows the last action of a rank; 0 on ranks without any. [n, ranks]
        rank_ends, link_ends, ends, arrivals: scratch, as in `run_actions`.
        lengths: filled. [n]
    """
    for i in range(len(lengths)):
        _run(graph, duration_ns[i], transfer_ns[i], rank_ends, link_ends, ends, arrivals)
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
        duration_ns, transfer_ns, ends, arrivals: as in `run_actions`.
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
