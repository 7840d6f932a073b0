"""The judge's clockwork for links that several flows share, between devices that compute while they transfer.

Nothing but a queue needs to know what time it is. So every line runs on as far as its inputs are known, without
regard to the others, and hands its transfers to one heap, the earliest ready first. When no line can go on, the first
in the heap is the next of its link: whatever is still to come waits for some transfer of the heap, and is ready later
than that one, for no transfer takes no time.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from bapipe.simulator.compiled import CompiledSchedule, Times


def run_fifo_links(program: CompiledSchedule, duration_ns: Sequence[int], transfer_ns: Sequence[int]) -> Times:
    """Returns when everything ends, as `recurrence.run` does; about a million actions a second.

    Exact only where every action takes time whose transfer may have to queue: at one instant it would make a
    difference which transfers have become ready and which are about to.
    """
    num_slots, shared, flow_links, takers = program.num_slots, program.shared, program.flow_links, program.takers
    bits, rows = num_slots.bit_length(), program.rows
    slot_bits = (1 << bits) - 1
    arrivals = [-1] * num_slots
    arrivals[num_slots - 3] = 0
    lines = [0] * len(rows)
    places = [0] * len(rows)
    blocked = [-1] * len(rows)  # the slot each line waits for
    links = [0] * len(program.links)
    ends = [0] * len(program.actions)
    transfer_of = [*transfer_ns, 0]  # the last one is of what stays where it is
    heap: list[int] = []
    ready = list(range(len(rows)))
    while True:
        while ready:
            line = ready.pop()
            own, at, end = rows[line], places[line], lines[line]
            while True:
                place, cost, need, give, flow, taker = own[at]
                arrival = arrivals[need]
                if arrival < 0:
                    blocked[line] = need
                    break
                if arrival > end:
                    end = arrival
                end += duration_ns[cost]
                ends[place] = end
                at += 1
                if not transfer_of[flow]:
                    arrivals[give] = end
                elif shared[flow]:
                    heappush(heap, end << bits | give)
                    continue
                else:
                    link, free = flow_links[flow], links[flow_links[flow]]
                    links[link] = arrivals[give] = (free if free > end else end) + transfer_of[flow]
                if taker >= 0 and blocked[taker] == give:
                    ready.append(taker)
            places[line], lines[line] = at, end
        if not heap:
            return Times(ends, arrivals, lines)
        first = heappop(heap)
        slot, end = first & slot_bits, first >> bits
        flow = program.slot_flows[slot]
        link = flow_links[flow]
        free = links[link]
        links[link] = arrivals[slot] = (free if free > end else end) + transfer_of[flow]
        line = takers[slot]
        if blocked[line] == slot:
            ready.append(line)
