"""The engine for links that several channels share, if every device computes while it transfers.

A link carries one transfer at a time, in the order in which they become ready. Only these queues need a common clock.
So every lane runs as far as the messages it consumes are known, without regard to the other lanes, and puts its
transfers into one heap ordered by ready time. When no lane can go on, the first transfer of the heap is the next of its
link: whatever is still to come consumes, directly or not, the message of some transfer in the heap, and becomes ready
later than that one, because no transfer takes zero time.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from bapipe.simulator.compiled import NUM_SPECIAL_MESSAGES, ActionTimes, CompiledSchedule


def run_fifo_links(compiled: CompiledSchedule, duration_ns: Sequence[int], transfer_ns: Sequence[int]) -> ActionTimes:
    """Returns when everything ends, as `run_longest_path` does; about a million actions per second.

    Exact only if every action takes time whose transfer may have to queue: with an action of zero time, the transfers
    that become ready at one instant would not all be in the heap when the first of them is taken.
    """
    num_messages, may_queue = compiled.num_messages, compiled.may_queue
    channel_links, consumer_lanes = compiled.channel_links, compiled.consumer_lanes
    # A heap entry is one integer: the ready time in the high bits, the message in the low bits (the order of ties).
    message_bits = num_messages.bit_length()
    message_mask = (1 << message_bits) - 1
    arrivals = [-1] * num_messages
    arrivals[num_messages - NUM_SPECIAL_MESSAGES] = 0
    lane_ops = compiled.lane_ops
    lane_ends = [0] * len(lane_ops)
    next_op = [0] * len(lane_ops)
    awaited = [-1] * len(lane_ops)  # the message each lane waits for
    link_ends = [0] * len(compiled.links)
    ends = [0] * len(compiled.actions)
    transfer_of = [*transfer_ns, 0]  # channel -1, the last one: what stays on its device
    heap: list[int] = []
    ready = list(range(len(lane_ops)))
    while True:
        # Run every lane until it lacks a message.
        while ready:
            lane = ready.pop()
            ops, position, end = lane_ops[lane], next_op[lane], lane_ends[lane]
            while True:
                index, duration, consumes, produces, channel, consumer = ops[position]
                arrival = arrivals[consumes]
                if arrival < 0:
                    awaited[lane] = consumes
                    break
                if arrival > end:
                    end = arrival
                end += duration_ns[duration]
                ends[index] = end
                position += 1
                if not transfer_of[channel]:
                    arrivals[produces] = end
                elif may_queue[channel]:
                    heappush(heap, end << message_bits | produces)
                    continue
                else:
                    link = channel_links[channel]
                    free = link_ends[link]
                    link_ends[link] = arrivals[produces] = (free if free > end else end) + transfer_of[channel]
                if consumer >= 0 and awaited[consumer] == produces:
                    ready.append(consumer)
            next_op[lane], lane_ends[lane] = position, end
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
