"""Compiled: the step of a plan on a line of devices.

A replica with n micro-batches of which w are in flight runs F of the first w, then B and F in turn, then B. Both orders
that are estimated are of this form: 1F1B with w = ceil(devices from here on / replicas), and GPipe with w = n. Stages
are visited there and back, and each replica runs for as long as what it waits for has arrived: the longest path, as in
the simulator (`longest_path.py`), action by action.
"""

from math import inf

from bapipe.planner.compiled import compiled, inlined
from bapipe.planner.device_line.recompute_programme import Need, choose_recomputed
from bapipe.planner.device_line.search_arrays import Costs, Floats, Ints, Notes, Plan, Records, Replicas

SMOOTHING = 0.03
"""The part of the mean end of the stages in a score."""

STAGE_ACTIONS = 20
"""What a stage costs before its first action, in actions."""

PRIME = 1_000_003
"""Spreads the begins of stages over the remainders of which choices are known."""


@compiled
def estimate_ns(costs: Costs, plan: Plan, notes: Notes, highest_ns: float) -> tuple[float, float, int]:
    """Returns the score of a plan, its step, and the actions that this has cost.

    The score is the step and a small part of the mean end of the stages: of two plans with equal steps the one in which
    other stages have more time left is nearer to a faster one. Both are infinite if the plan does not fit, or if its
    score is above `highest_ns`.
    """
    num_stages = plan.num_stages[0]
    num_actions = STAGE_ACTIONS * num_stages
    if not _fill_stages(costs, plan, notes) or _least_ns(costs, notes, num_stages) > highest_ns:
        return inf, inf, num_actions
    _start(costs, notes, num_stages)
    num_left = 2 * num_stages * costs.num_microbatches
    first_turn, goes_back = 0, False
    while True:
        for turn in range(first_turn, num_stages):
            num_run = _advance(costs, notes, num_stages, num_stages - 1 - turn if goes_back else turn)
            num_left, num_actions = num_left - num_run, num_actions + num_run
        first_turn, goes_back = 1, not goes_back
        score_ns, step_ns = _so_far_ns(costs, notes, num_stages)
        if score_ns > highest_ns:
            return inf, inf, num_actions
        if num_left == 0:
            return score_ns, step_ns, num_actions


@inlined
def _fill_stages(costs: Costs, plan: Plan, notes: Notes) -> bool:
    """Notes what each stage takes; returns whether all fit.

    Most stages are those of the plan before, with the same layers on the same devices: what they take is known.
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
    """Forgets the stages behind so many: others may have had their devices since."""
    for stage in notes.stages[num_stages:]:
        if stage.count == 0:
            break
        stage.count = 0


@inlined
def _recomputed_ns(costs: Costs, stage: Records, notes: Notes) -> float:
    """Returns F that a stage runs again on its first device's kind, infinite if it does not fit even with all layers.

    On the device with the least memory, as in `stage_memory.py`.
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
    """Notes what each replica of a stage takes, and what all take at least.

    Args:
        again_ns: F that is recomputed on the kind of its first device; of others it is the same part of all F.
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
        # All update when the last ring is done.
        after = max(replicas.after[p] + update / slowest, update / costs.devices[replicas.rank[p]].speed)
        replicas.after[p] = after
        num_each = least_each + 1 if p - first < num_more else least_each
        stage.least_forward = min(stage.least_forward, replicas.forward[p])
        stage.least_backward = min(stage.least_backward, replicas.backward[p])
        stage.least_after = min(stage.least_after, after)
        stage.busiest = max(stage.busiest, num_each * (replicas.forward[p] + replicas.backward[p]))


@inlined
def _sort_replicas(costs: Costs, rank: Ints, first: int, count: int) -> None:
    """Orders the devices of a stage by class, as `DeviceLine.group` does; mostly they are in order."""
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
    """Returns how long the rings of a stage end after the last B of a replica of some speed, if all are like it.

    -inf without rings. Buckets fill from the last layer to the first, and each is summed behind the one before it.
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


@inlined
def _least_ns(costs: Costs, notes: Notes, num_stages: int) -> float:
    """Returns a score that a plan does not beat, by the bounds of stages and what follows in the stages before them.

    The last B of a stage comes no earlier than its work, or the round trip of its first micro-batch, says. Then that
    micro-batch goes back through the stages before it, as `ring_bound.py` has it: behind others of the last
    micro-batches on the same replica, and before the all-reduce.
    """
    num_microbatches, last_count = costs.num_microbatches, notes.stages[num_stages - 1].count
    there = back = 0.0  # from the first stage to each, and back from it
    for stage in notes.stages[:num_stages]:
        cut = costs.layers[stage.begin]
        there += stage.least_forward + min(cut.sent_inside, cut.sent_between)
        back += stage.least_backward + min(cut.returned_inside, cut.returned_between)
    round_trip = there + back
    num_backs = 0
    latest = total = 0.0
    for s in range(num_stages - 1, -1, -1):
        stage = notes.stages[s]
        there, back = there - stage.least_forward, back - stage.least_backward
        num_each = (num_microbatches + stage.count - 1) // stage.count
        num_apart = num_each - stage.in_flight
        if costs.is_gpipe:
            num_apart = max(0, (num_microbatches - last_count) // stage.count)
        around = round_trip + (num_each - 1) * stage.least_backward + num_apart * stage.least_forward
        end = max(there + stage.busiest + back, around)
        own = _behind_others(notes, num_backs, end, stage)
        num_backs = _add_back(notes, num_backs, end, num_microbatches - 1 - (num_each - 1) * stage.count)
        done = own - back + stage.least_after
        latest, total = max(latest, done, end), total + done
        cut = costs.layers[stage.begin]
        there -= min(cut.sent_inside, cut.sent_between)
        back -= min(cut.returned_inside, cut.returned_between)
    return latest + SMOOTHING * total / num_stages


@inlined
def _behind_others(notes: Notes, num_backs: int, end: float, stage: Records) -> float:
    """Returns when the last micro-batch of a stage is back at the first stage, also behind those of later stages."""
    for other in notes.stages[:num_backs]:
        end = max(end, other.back + other.num_others // stage.count * stage.least_backward)
    return end


@inlined
def _add_back(notes: Notes, num_backs: int, end: float, num_others: int) -> int:
    """Notes when the last micro-batches of a stage are back at the first, and how many others end with them.

    If none were before them. More of both stand for less of both. Returns how many are left.
    """
    num_kept = 0
    for other in notes.stages[:num_backs]:
        if other.back >= end and other.num_others >= num_others:
            return num_backs
    for other in notes.stages[:num_backs]:
        if other.back > end or other.num_others > num_others:
            kept = notes.stages[num_kept]
            kept.back, kept.num_others, num_kept = other.back, other.num_others, num_kept + 1
    notes.stages[num_kept].back, notes.stages[num_kept].num_others = end, num_others
    return num_kept + 1


@inlined
def _start(costs: Costs, notes: Notes, num_stages: int) -> None:
    """Puts every replica before its first action: the inputs have arrived, and the last stage needs no gradients."""
    for s in range(num_stages):
        stage = notes.stages[s]
        stage.num_forward, stage.num_backward, stage.sent_each = 0, 0, costs.num_microbatches
        if s < num_stages - 1:
            stage.sent_each = _same_link(stage.count, notes.stages[s + 1].count)
        notes.replicas.time[stage.first : stage.first + stage.count] = 0.0
        hosts, r = notes.hosts[s + 1], 0
        for m in range(costs.num_microbatches):
            hosts[m] = costs.devices[notes.replicas.rank[stage.first + r]].host
            r = r + 1 if r < stage.count - 1 else 0
    notes.sent[0], notes.returned[num_stages] = 0.0, 0.0


@inlined
def _so_far_ns(costs: Costs, notes: Notes, num_stages: int) -> tuple[float, float]:
    """Returns the score and the step if nothing more is waited for than the gradients of each stage's last B.

    Both only rise while stages advance, and are true when all actions have run.
    """
    step_ns = sum_ns = last_ns = 0.0
    for s in range(num_stages - 1, -1, -1):
        stage = notes.stages[s]
        cut = costs.layers[stage.end]
        back_ns = last_ns + min(cut.returned_inside, cut.returned_between) + stage.least_backward
        last_ns = max(stage.last, back_ns if s < num_stages - 1 else 0.0)
        done_ns = max(stage.done, last_ns + stage.least_after)
        step_ns, sum_ns = max(step_ns, done_ns), sum_ns + done_ns
    return step_ns + SMOOTHING * sum_ns / num_stages, step_ns


@inlined
def _same_link(one: int, other: int) -> int:
    """Returns how many micro-batches later the same replicas of two stages have one: the least common multiple."""
    rest, divisor = one, other
    while rest:
        rest, divisor = divisor % rest, rest
    return one // divisor * other


@inlined
def _advance(costs: Costs, notes: Notes, num_stages: int, s: int) -> int:
    """Runs the replicas of a stage as far as what they wait for has arrived; returns how many actions have run.

    Also notes when the last B ends and the stage is done if nothing more is waited for. F of all replicas run in the
    order of their micro-batches, and so do B: neighbours lie next to each other in memory. No stage waits for ever, as
    with D devices from a stage on F of D micro-batches at least run there before the first B, and fewer behind it.
    """
    stage, num_microbatches = notes.stages[s], costs.num_microbatches
    count, num_more = stage.count, (stage.in_flight - 1) * stage.count  # F of so many later ones come before each B
    layers, replicas = costs.layers, notes.replicas
    sent = layers[stage.end].sent_inside, layers[stage.end].sent_between
    returned = layers[stage.begin].returned_inside, layers[stage.begin].returned_between
    sent_each, returned_each = stage.sent_each, notes.stages[s - 1].sent_each if s > 0 else num_microbatches
    num_inputs = notes.stages[s - 1].num_forward if s > 0 else num_microbatches
    num_gradients = notes.stages[s + 1].num_backward if s < num_stages - 1 else num_microbatches
    num_forward, num_backward = stage.num_forward, stage.num_backward
    while True:
        end = min(num_inputs, num_backward + num_more + count)
        _run(notes, s, 1, replicas.forward, notes.sent[s], notes.sent[s + 1], num_forward, end, sent_each, sent)
        num_forward = max(num_forward, end)
        is_last = num_forward == num_microbatches
        end = min(num_gradients, num_microbatches if is_last else num_forward - num_more)
        if end <= num_backward:
            break
        gradients, into = notes.returned[s + 1], notes.returned[s]
        _run(notes, s, -1, replicas.backward, gradients, into, num_backward, end, returned_each, returned)
        num_backward = end
    num_actions = num_forward + num_backward - stage.num_forward - stage.num_backward
    stage.num_forward, stage.num_backward = num_forward, num_backward
    last_ns = done_ns = 0.0
    more, more_forward, more_backward = num_microbatches % count, num_forward % count, num_backward % count
    left_forward = num_microbatches // count - num_forward // count
    left_backward = num_microbatches // count - num_backward // count
    for r in range(count):
        p, one_more = stage.first + r, 1 if r < more else 0
        own_ns = replicas.time[p] + (left_forward + one_more - (1 if r < more_forward else 0)) * replicas.forward[p]
        own_ns += (left_backward + one_more - (1 if r < more_backward else 0)) * replicas.backward[p]
        last_ns, done_ns = max(last_ns, own_ns), max(done_ns, own_ns + replicas.after[p])
    stage.last, stage.done = last_ns, done_ns
    return int(num_actions)


@inlined
def _run(
    notes: Notes,
    s: int,
    to: int,
    durations: Floats,
    inputs: Floats,
    outputs: Floats,
    begin: int,
    end: int,
    each: int,
    transfer: tuple[float, float],
) -> None:
    """Runs F or B of some micro-batches on a stage. A link carries one transfer at a time.

    Args:
        to: 1 if outputs go to the next stage, -1 if they go to the one before.
        inputs, outputs: when they arrive. [M]
        begin, end: the micro-batches.
        each: from one to the next on the same link.
        transfer: its time within a host, and between hosts.
    """
    first, count, m = notes.stages[s].first, notes.stages[s].count, begin
    own_hosts, hosts = notes.hosts[s + 1], notes.hosts[s + 1 + to]
    while m < end:
        r = m % count
        num = min(count - r, end - m)
        times, own_ns = notes.replicas.time[first + r : first + r + num], durations[first + r : first + r + num]
        arrived, sent = inputs[m : m + num], outputs[m : m + num]
        for x in range(num):
            times[x] = max(times[x], arrived[x]) + own_ns[x]
            sent[x] = times[x]
        if m >= each:
            free = outputs[m - each : m - each + num]
            for x in range(num):
                sent[x] = max(sent[x], free[x])
        here, there = own_hosts[m : m + num], hosts[m : m + num]
        for x in range(num):
            sent[x] += transfer[0] if here[x] == there[x] else transfer[1]
        m += num
