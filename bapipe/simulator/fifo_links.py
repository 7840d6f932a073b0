"""The engine for links that several channels share, if every device computes while it transfers.

A link carries one transfer at a time, in the order in which they become ready. Only these queues need a common clock.
So every lane runs as far as the messages it consumes are known, without regard to the other lanes, and puts its
transfers into one heap ordered by ready time. When no lane can go on, the first transfer of the heap is the next of its
link: whatever is still to come consumes, directly or not, the message of some transfer in the heap, and becomes ready
later than that one, because no transfer takes zero time.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import chain

from bapipe.simulator.compiled import NUM_SPECIAL_MESSAGES, ActionTimes, CompiledSchedule


def run_fifo_links(compiled: CompiledSchedule, duration_ns: Sequence[int], transfer_ns: Sequence[int]) -> ActionTimes:
    """Returns when everything ends, as `run_longest_path` does; about a million actions per second.

    Exact only if every action takes time whose transfer may have to queue: with an action of zero time, the transfers
    that become ready at one instant would not all be in the heap when the first of them is taken.
    """
    num_messages, may_queue = compiled.num_messages, compiled.may_queue
    available, never, _ = range(num_messages - NUM_SPECIAL_MESSAGES, num_messages)
    channel_links, consumer_lanes = compiled.channel_links, compiled.consumer_lanes
    durations, produces, channel_of = compiled.durations, compiled.produces, compiled.channel_of
    # A heap entry is one integer: the ready time in the high bits, the message in the low bits (the order of ties).
    message_bits = num_messages.bit_length()
    message_mask = (1 << message_bits) - 1
    arrivals = [-1] * num_messages
    arrivals[available] = 0
    consumes = (*compiled.consumes, never)  # the last one: of lanes that have run all their actions
    remaining = [chain(positions, (len(consumes) - 1,)) for positions in compiled.lane_positions]
    heads = [next(lane) for lane in remaining]
    lane_ends = [0] * len(heads)
    awaited = [-1] * len(heads)  # the message each lane waits for
    link_ends = [0] * len(compiled.links)
    ends = [0] * len(compiled.actions)
    transfer_of = [*transfer_ns, 0]  # channel -1, the last one: what stays on its device
    heap: list[int] = []
    ready = list(range(len(heads)))
    while True:
        # Run every lane until it lacks a message.
        while ready:
            lane = ready.pop()
            index, end, following = heads[lane], lane_ends[lane], remaining[lane]
            while True:
                arrival = arrivals[consumes[index]]
                if arrival < 0:
                    awaited[lane] = consumes[index]
                    break
                if arrival > end:
                    end = arrival
                end += duration_ns[durations[index]]
                ends[index] = end
                message, channel = produces[index], channel_of[index]
                index = next(following)
                if not transfer_of[channel]:
                    arrivals[message] = end
                elif may_queue[channel]:
                    heappush(heap, end << message_bits | message)
                    continue
                else:
                    link = channel_links[channel]
                    free = link_ends[link]
                    link_ends[link] = arrivals[message] = (free if free > end else end) + transfer_of[channel]
                consumer = consumer_lanes[message]
                if consumer >= 0 and awaited[consumer] == message:
                    ready.append(consumer)
            heads[lane], lane_ends[lane] = index, end
        if not heap:
            return ActionTimes(ends, arrivals, lane_ends)
        # The transfer that is ready first goes next on its link.
        first = heappop(heap)
        message, end = first & message_mask, first >> message_bits
        channel = compiled.message_channels[message]
        link = channel_links[channel]
        free = link_ends[link]
        link_ends[link] = arrivals[message] = (free if free > end else end) + transfer_of[channel]
        lane = consumer_lanes[message]
        if awaited[lane] == message:
            ready.append(lane)
