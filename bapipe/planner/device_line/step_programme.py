"""Compiled: the step of a plan on a line of devices.

A replica with n micro-batches of which w are in flight runs F of the first w, then B and F in turn, then B. Both orders
that are estimated are of this form: 1F1B with w = ceil(devices from here on / replicas), and GPipe with w = n. Stages
are visited forwards and backwards in turn, and each replica runs as long as its inputs have arrived: a longest path,
action by action, as in the simulator (`longest_path.py`).
"""

from math import inf

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.compiled import compiled, inlined
from bapipe.planner.device_line.search_arrays import Costs, Notes, Plan, Records
from bapipe.planner.device_line.stage_programme import fill_stages

SMOOTHING = 0.03
"""The weight of the mean end of the stages in a score."""

STAGE_ACTIONS = 20
"""The cost of a stage before its first action, in actions."""


@compiled
def estimate_ns(costs: Costs, plan: Plan, notes: Notes, highest_ns: float) -> tuple[float, float, int]:
    """Returns the score of a plan, its step in ns, and the cost of this estimate in actions.

    The score is the step plus a small part of the mean end of the stages: of two plans with equal steps, the one whose
    other stages have more slack is closer to a faster plan. Score and step are infinite if the plan does not fit, or if
    its score is above `highest_ns`.
    """
    num_stages = plan.num_stages[0]
    num_actions = STAGE_ACTIONS * num_stages
    if not fill_stages(costs, plan, notes) or _least_ns(costs, notes, num_stages) > highest_ns:
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
def _least_ns(costs: Costs, notes: Notes, num_stages: int) -> float:
    """Returns a lower bound on the score, by the bounds of stages and what follows in the stages before them.

    The last B of a stage ends no earlier than its work, or the round trip of its first micro-batch, allows. Then that
    micro-batch goes back through the earlier stages, as in `ring_bound.py`: after others of the last micro-batches on
    the same replica, and before the all-reduce.
    """
    num_microbatches, last_count = costs.num_microbatches, notes.stages[num_stages - 1].count
    there = back = 0.0  # the trips from the first stage to each, and back
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
    """Returns when a stage's last micro-batch is back at the first stage, also after those of later stages."""
    for other in notes.stages[:num_backs]:
        end = max(end, other.back + other.num_others // stage.count * stage.least_backward)
    return end


@inlined
def _add_back(notes: Notes, num_backs: int, end: float, num_others: int) -> int:
    """Adds when the last micro-batches of a stage are back at the first stage, and how many others end with them.

    The time assumes that no others come before them. Entries that are dominated in both are dropped. Returns the number
    of entries.
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
    """Resets every replica to before its first action; inputs have arrived, and the last stage needs no gradients."""
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
    """Returns the score and the step if stages wait for nothing more, except for the gradients of their last B.

    Both only rise while stages advance, and are exact once all actions have run.
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
    """Returns after how many micro-batches the same replicas of two stages meet again: the least common multiple."""
    rest, divisor = one, other
    while rest:
        rest, divisor = divisor % rest, rest
    return one // divisor * other


@inlined
def _advance(costs: Costs, notes: Notes, num_stages: int, s: int) -> int:
    """Runs the replicas of a stage as far as their inputs have arrived; returns how many actions have run.

    Also stores when the last B ends and the stage is done if it waits for nothing more. F of all replicas run in the
    order of their micro-batches, and so do B: neighbours are adjacent in memory. There is no deadlock: with D devices
    from a stage on, at least D micro-batches run F there before the first B, and fewer in later stages.
    """
    stage, num_microbatches = notes.stages[s], costs.num_microbatches
    count, num_more = stage.count, (stage.in_flight - 1) * stage.count  # how many later F come before each B
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
        each: after how many micro-batches the same link is used again.
        transfer: the times of a transfer within a host and between hosts.
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
