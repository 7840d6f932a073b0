"""The judge's general clockwork, event after event: for devices that cannot compute while they transfer.

An event is one integer, its time in the high bits; below it the place of the action that ends, or beyond all places
the slot that a transfer fills.
"""

from collections.abc import Sequence
from functools import reduce
from heapq import heappop, heappush
from operator import or_

from bapipe.simulator.compiled import CompiledSchedule, Times


def run_event_driven(
    program: CompiledSchedule, duration_ns: Sequence[int], transfer_ns: Sequence[int], overlaps: Sequence[bool]
) -> Times:
    """Returns when everything ends, as `recurrence.run` does, on any device and any link.

    `overlaps` says of each rank whether it computes while it transfers. At each instant: first all that ends, then
    transfers that can start, then actions that can start, until nothing changes.
    """
    num_actions, num_slots, num_lines = len(program.actions), program.num_slots, len(program.line_ranks)
    by_place, slot_links = program.by_place, program.slot_links
    bits = (num_actions + num_slots).bit_length()
    low = (1 << bits) - 1
    transfer_of = [transfer_ns[flow] if flow >= 0 else 0 for flow in program.slot_flows]
    bit_of, need_of, frees = _masks(program, overlaps)
    never = 1 << 200
    ends, arrivals = [0] * num_actions, [never] * num_slots
    arrivals[num_slots - 3] = 0
    queues: list[list[int]] = [[] for _ in need_of]  # ready time in the high bits, then the slot
    links_in: dict[int, list[int]] = {}  # links by their bits
    rest = [iter(line) for line in program.rows]
    heads = [next(line) for line in rest]
    events = [never]
    woken, now, busy, queued = tuple(range(num_lines)), 0, 0, 0
    while True:
        for line in woken:
            if not busy >> line & 1:
                place, cost, need, _, _, _ = heads[line]
                if arrivals[need] <= now:
                    busy |= 1 << line
                    ends[place] = end_ns = now + duration_ns[cost]
                    heappush(events, end_ns << bits | place)
                    heads[line] = next(rest[line])
        first = heappop(events)
        if first == never:
            return Times(ends, arrivals, _last_ends(program, ends))
        now, ended, woken, freed = first >> bits, first & low, (), 0
        while True:
            if ended < num_actions:
                line, give, link, wakes = by_place[ended]
                busy ^= 1 << line
                freed |= frees[line]
                woken += wakes
                if transfer_of[give]:
                    heappush(queues[link], now << bits | give)
                    queued |= bit_of[link]
                    freed |= bit_of[link]
                else:
                    arrivals[give] = now
            else:
                link, wakes = slot_links[ended - num_actions]
                busy ^= need_of[link]
                freed |= frees[num_lines + link]
                woken += wakes
            if events[0] > first | low:
                break
            ended = heappop(events) & low
        freed &= queued
        if freed:
            if freed not in links_in:
                links_in[freed] = [k for k, bit in enumerate(bit_of) if freed & bit]
            links = [k for k in links_in[freed] if not busy & need_of[k]]
            if len(links) > 1:
                links.sort(key=queues.__getitem__)
            for k in links:
                if not busy & need_of[k]:
                    queue = queues[k]
                    slot = heappop(queue) & low
                    if not queue:
                        queued ^= bit_of[k]
                    busy |= need_of[k]
                    arrivals[slot] = end_ns = now + transfer_of[slot]
                    heappush(events, end_ns << bits | num_actions + slot)


def _last_ends(program: CompiledSchedule, ends_ns: Sequence[int]) -> list[int]:
    """Returns when each line has run its actions, 0 for one without."""
    return [ends_ns[line[-2].place] if len(line) > 1 else 0 for line in program.rows]


def _masks(program: CompiledSchedule, overlaps: Sequence[bool]) -> tuple[list[int], list[int], list[int]]:
    """Returns the bit of each link, what each link needs, and the links that the end of something may set free.

    A bit is a line's or a link's. A link needs itself and those of its ends that do not overlap. What ends is an action
    on a line, or a transfer on a link, which stand behind the lines.
    """
    num_lines = len(program.line_ranks)
    bit_of = [1 << num_lines + k for k in range(len(program.links))]
    stalls = [[rank for rank in link if not overlaps[rank]] for link in program.links]
    need_of = [bit + sum(1 << rank for rank in held) for bit, held in zip(bit_of, stalls, strict=True)]
    touching = [sum(bit for bit, need in zip(bit_of, need_of, strict=True) if need >> n & 1) for n in range(num_lines)]
    after = [bit | reduce(or_, (touching[n] for n in held), 0) for bit, held in zip(bit_of, stalls, strict=True)]
    return bit_of, need_of, [*touching, *after]
