"""The general engine, a discrete-event simulation: exact on any device, also one that stalls while it transfers.

An event is one integer: its time in the high bits; in the low bits the index of the action that ends or, beyond the
indices of all actions, the message whose transfer ends.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from heapq import heappop, heappush
from itertools import chain
from operator import or_

from bapipe.simulator.compiled import NUM_SPECIAL_MESSAGES, ActionTimes, CompiledSchedule


def run_event_driven(
    compiled: CompiledSchedule, duration_ns: Sequence[int], transfer_ns: Sequence[int], overlaps: Sequence[bool]
) -> ActionTimes:
    """Returns when everything ends, as `run_longest_path` does.

    `overlaps` says of each rank whether it computes while it transfers. At each instant: first all that ends, then
    transfers that can start, then actions that can start, until nothing changes.
    """
    num_actions, num_messages, num_lanes = len(compiled.actions), compiled.num_messages, len(compiled.lane_ranks)
    available, never_comes, _ = range(num_messages - NUM_SPECIAL_MESSAGES, num_messages)
    lanes, durations, produces = compiled.lanes, compiled.durations, compiled.produces
    consumer_lanes, message_channels = compiled.consumer_lanes, compiled.message_channels
    channel_links, sources = compiled.channel_links, [channel.source for channel in compiled.channels]
    event_bits = (num_actions + num_messages).bit_length()
    event_mask = (1 << event_bits) - 1
    transfer_of = [transfer_ns[channel] if channel >= 0 else 0 for channel in message_channels]
    link_bit, link_needs, frees = _masks(compiled, overlaps)
    lane_bit = [1 << lane for lane in range(num_lanes)]
    never = 1 << 200
    ends, arrivals = [0] * num_actions, [never] * num_messages
    arrivals[available] = 0
    queues: list[list[int]] = [[] for _ in link_needs]  # per link: ready time in the high bits, then the message
    links_of: dict[int, list[int]] = {}  # links by their bits
    consumes = (*compiled.consumes, never_comes)  # the last one: of lanes that have run all their actions
    remaining = [chain(positions, (num_actions,)) for positions in compiled.lane_positions]
    heads = [next(lane) for lane in remaining]
    events = [never]
    # `busy` has the bits of the lanes and links that are in use, `queued` those of the links with a queue.
    woken, now, busy, queued = list(range(num_lanes)), 0, 0, 0
    while True:
        # Actions that can start.
        for lane in woken:
            if not busy & lane_bit[lane]:
                index = heads[lane]
                if arrivals[consumes[index]] <= now:
                    busy |= lane_bit[lane]
                    ends[index] = end_ns = now + duration_ns[durations[index]]
                    heappush(events, end_ns << event_bits | index)
                    heads[lane] = next(remaining[lane])
        first = heappop(events)
        if first == never:
            return ActionTimes(ends, arrivals, _lane_ends(compiled, ends))
        # All that ends at the next instant.
        now, ended, woken, freed = first >> event_bits, first & event_mask, [], 0
        while True:
            if ended < num_actions:
                lane, message = lanes[ended], produces[ended]
                busy ^= lane_bit[lane]
                freed |= frees[lane]
                woken.append(lane)
                if transfer_of[message]:
                    link = channel_links[message_channels[message]]
                    heappush(queues[link], now << event_bits | message)
                    queued |= link_bit[link]
                    freed |= link_bit[link]
                else:
                    arrivals[message] = now
                    if consumer_lanes[message] >= 0:
                        woken.append(consumer_lanes[message])
            else:
                message = ended - num_actions
                channel = message_channels[message]
                link = channel_links[channel]
                busy ^= link_needs[link]
                freed |= frees[num_lanes + link]
                woken += consumer_lanes[message], sources[channel]
            if events[0] > first | event_mask:
                break
            ended = heappop(events) & event_mask
        # Transfers that can start, the one that became ready first before the others.
        freed &= queued
        if freed:
            if freed not in links_of:
                links_of[freed] = [index - num_lanes for index in _set_bits(freed)]
            links = [link for link in links_of[freed] if not busy & link_needs[link]]
            if len(links) > 1:
                links.sort(key=queues.__getitem__)
            for link in links:
                if not busy & link_needs[link]:
                    queue = queues[link]
                    message = heappop(queue) & event_mask
                    if not queue:
                        queued ^= link_bit[link]
                    busy |= link_needs[link]
                    arrivals[message] = end_ns = now + transfer_of[message]
                    heappush(events, end_ns << event_bits | num_actions + message)


def _lane_ends(compiled: CompiledSchedule, ends_ns: Sequence[int]) -> list[int]:
    """Returns when each lane has run its actions, 0 for one without."""
    return [ends_ns[positions[-1]] if positions else 0 for positions in compiled.lane_positions]


def _set_bits(bits: int) -> Iterator[int]:
    """Yields the indices of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _masks(compiled: CompiledSchedule, overlaps: Sequence[bool]) -> tuple[list[int], list[int], list[int]]:
    """Returns the bit of each link, the bits of what each link needs, and the links that an end may set free.

    Bits 0 to L - 1 are those of the lanes, the links' bits follow. A transfer needs its link, and the lane of each of
    its two ranks that cannot compute meanwhile. The third list is by what ends: an action on a lane, or behind the
    lanes a transfer on a link.
    """
    num_lanes = len(compiled.lane_ranks)
    link_bit = [1 << num_lanes + link for link in range(len(compiled.links))]
    stalled = [[rank for rank in ranks if not overlaps[rank]] for ranks in compiled.links]
    link_needs = [bit + sum(1 << rank for rank in ranks) for bit, ranks in zip(link_bit, stalled, strict=True)]
    links_of_lane = [
        sum(bit for bit, needs in zip(link_bit, link_needs, strict=True) if needs >> lane & 1)
        for lane in range(num_lanes)
    ]
    links_of_link = [
        bit | reduce(or_, (links_of_lane[rank] for rank in ranks), 0)
        for bit, ranks in zip(link_bit, stalled, strict=True)
    ]
    return link_bit, link_needs, [*links_of_lane, *links_of_link]
