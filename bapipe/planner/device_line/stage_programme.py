"""Compiled: the times of the stages of a plan on a line of devices: F, B, and what follows the last B."""

from math import inf

from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.compiled import inlined
from bapipe.planner.device_line.recompute_programme import Need, choose_recomputed
from bapipe.planner.device_line.search_arrays import Costs, Notes, Plan, Records, Replicas

PRIME = 1_000_003
"""Multiplier of the hash by which choices of recomputed layers are cached."""


@inlined
def fill_stages(costs: Costs, plan: Plan, notes: Notes) -> bool:
    """Stores the times of each stage; returns whether all fit.

    Most stages have the same layers on the same devices as in the previous plan: their times are kept.
    """
    num_stages = plan.num_stages[0]
    num_devices = plan.counts[:num_stages].sum()
    num_behind = num_devices
    for s in range(num_stages):
        stage, count = notes.stages[s], plan.counts[s]
        begin, end = costs.boundaries[plan.cuts[s]], costs.boundaries[plan.cuts[s + 1]]
        depth = costs.num_microbatches if costs.is_gpipe else min(num_behind, costs.num_microbatches)
        first, in_flight = num_devices - num_behind, (depth + count - 1) // count
        num_behind -= count
        is_known = stage.begin == begin and stage.end == end and stage.first == first
        if is_known and stage.count == count and stage.in_flight == in_flight:
            continue
        stage.begin, stage.end, stage.first, stage.count, stage.in_flight = begin, end, first, count, in_flight
        again_ns = _recomputed_ns(costs, stage, notes)
        if again_ns == inf:
            _forget(notes, s)
            return False
        _fill_replicas(costs, stage, notes.replicas, again_ns)
    _forget(notes, num_stages)
    return True


@inlined
def _forget(notes: Notes, num_stages: int) -> None:
    """Forgets the stages after the first `num_stages`: their devices may have been used by others since."""
    for stage in notes.stages[num_stages:]:
        if stage.count == 0:
            break
        stage.count = 0


@inlined
def _recomputed_ns(costs: Costs, stage: Records, notes: Notes) -> float:
    """Returns F that a stage runs again, on its first device's kind; infinite if it does not fit even with all layers.

    Memory is that of the device with the lowest limit, as in `line_memory.py`.
    """
    limit, workspace = costs.devices[stage.first].limit_bytes, costs.workspace_bytes[stage.begin]
    for p in range(stage.first + 1, stage.first + stage.count):
        limit = min(limit, costs.devices[p].limit_bytes)
    for layer in range(stage.begin + 1, stage.end):
        workspace = max(workspace, costs.workspace_bytes[layer])
    stash, received = costs.items.stash[stage.end] - costs.items.stash[stage.begin], costs.items.sent[stage.begin]
    returned = costs.layers[stage.end].returned_bytes
    num_each = (costs.num_microbatches + stage.count - 1) // stage.count
    state = costs.layers[stage.end].state_bytes - costs.layers[stage.begin].state_bytes
    num_bytes = state + workspace + num_each * (received + returned) + stage.in_flight * stash - limit
    if num_bytes <= 0:
        return 0.0
    if not costs.may_recompute:
        return inf
    kind = costs.devices[stage.first].kind
    known = notes.recomputed[(stage.begin * PRIME + stage.end + num_bytes) % notes.recomputed.size]
    is_known = known.begin == stage.begin and known.end == stage.end and known.kind == kind
    if not (is_known and known.kept == stage.in_flight and known.num_bytes == num_bytes):
        known.begin, known.end, known.kind, known.kept = stage.begin, stage.end, kind, stage.in_flight
        known.num_bytes = num_bytes
        need = Need(stage.begin, stage.end, kind, stage.in_flight, 1, num_bytes)
        known.forward_ns = choose_recomputed(costs.items, need, notes.came).forward_ns
    return float(known.forward_ns)


@inlined
def _fill_replicas(costs: Costs, stage: Records, replicas: Replicas, again_ns: float) -> None:
    """Stores the times of each replica of a stage, and their minima.

    Args:
        again_ns: the F that is recomputed, on the kind of its first device; on other kinds it is the same part of F.
    """
    first, count = stage.first, stage.count
    _sort_replicas(costs, replicas.rank, first, count)
    link = _slowest_link(costs, first, count)
    kind, speed = -1, 0.0
    forward = backward = summed = 0.0
    slowest, of_first = inf, costs.items.forward[costs.devices[first].kind]
    again = again_ns / max(of_first[stage.end] - of_first[stage.begin], 1.0)
    for p in range(first, first + count):
        device = costs.devices[replicas.rank[p]]
        if device.kind != kind or device.speed != speed:
            kind, speed = device.kind, device.speed
            forward = (costs.items.forward[kind, stage.end] - costs.items.forward[kind, stage.begin]) / speed
            backward = (costs.backward[kind, stage.end] - costs.backward[kind, stage.begin]) / speed
            summed = _summed_ns(costs, stage, kind, speed, link)
            backward += again * forward
            slowest = min(slowest, speed)
        replicas.forward[p], replicas.backward[p], replicas.after[p] = forward, backward, summed
    update = costs.layers[stage.end].update - costs.layers[stage.begin].update
    stage.least_forward = stage.least_backward = stage.least_after = inf
    stage.busiest = 0.0
    least_each, num_more = costs.num_microbatches // count, costs.num_microbatches % count
    for p in range(first, first + count):
        # All replicas update when the last ring is done.
        after = max(replicas.after[p] + update / slowest, update / costs.devices[replicas.rank[p]].speed)
        replicas.after[p] = after
        num_each = least_each + 1 if p - first < num_more else least_each
        stage.least_forward = min(stage.least_forward, replicas.forward[p])
        stage.least_backward = min(stage.least_backward, replicas.backward[p])
        stage.least_after = min(stage.least_after, after)
        stage.busiest = max(stage.busiest, num_each * (replicas.forward[p] + replicas.backward[p]))


@inlined
def _sort_replicas(costs: Costs, rank: Ints, first: int, count: int) -> None:
    """Sorts the devices of a stage by class, as `DeviceLine.replicas` does; they mostly are in order already."""
    for p in range(first, first + count):
        at, class_of = p, costs.devices[p].class_of
        while at > first and costs.devices[rank[at - 1]].class_of > class_of:
            rank[at] = rank[at - 1]
            at -= 1
        rank[at] = p


@inlined
def _slowest_link(costs: Costs, first: int, count: int) -> tuple[float, float, float, float]:
    """Returns latency and ns per byte of messages of a ring within hosts and between them, 0 if there are none."""
    num_hosts = 0
    for p in range(first, first + count):
        num_hosts += 1 if costs.devices[p].same_host < first else 0
    inside, between = 1.0 if num_hosts < count else 0.0, 1.0 if num_hosts > 1 else 0.0
    latency, ns_per_byte = costs.latency, costs.ns_per_byte
    return inside * latency[0], inside * ns_per_byte[0], between * latency[1], between * ns_per_byte[1]


@inlined
def _summed_ns(costs: Costs, stage: Records, kind: int, speed: float, link: tuple[float, float, float, float]) -> float:
    """Returns the time from the last B to the end of the rings, if all replicas have the given kind and speed.

    -inf without rings. Buckets fill from the last layer to the first, and each ring follows the previous one.
    """
    summed, to = -inf, stage.end
    begin, count, backward = stage.begin, stage.count, costs.backward[kind]
    while count > 1 and costs.layers[to].gradient_bytes > costs.layers[begin].gradient_bytes:
        at = costs.layers[to].bucket_begin
        if at < begin:
            at = costs.layers[begin].first_gradient
        message = (costs.layers[to].gradient_bytes - costs.layers[at].gradient_bytes + count - 1) // count
        ring = 2 * (count - 1) * max(link[0] + message * link[1], link[2] + message * link[3])
        is_full = (backward[begin] - backward[at]) / speed  # before the end of B
        summed, to = max(summed, is_full) + ring, at
    return summed
