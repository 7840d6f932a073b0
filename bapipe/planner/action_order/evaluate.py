"""Evaluates an order of a monotone problem: its timeline, equal to the simulator's, from one pass over the actions."""

from dataclasses import dataclass

from bapipe.planner.action_order.problem import OrderProblem, Orders


@dataclass(frozen=True, slots=True)
class OrderTiming:
    """When the actions of an order begin, by code and then micro-batch, and how long the step takes."""

    begins_ns: list[list[int]]  # [3 * stages][micro-batches]
    step_ns: int


def evaluate_order(problem: OrderProblem, orders: Orders) -> OrderTiming | None:
    """Returns the timeline in which everything starts as early as possible, None if the order deadlocks.

    Equals the simulator's if `problem.is_monotone`: every kind of transfer is assumed to have its own link, so a
    transfer waits only for the one before it of its kind. Runs each device until it needs an input that has not been
    sent yet, and continues it when the input is sent. O(n) for n actions.
    """
    begins: list[list[int]] = [[] for _ in problem.action_ns]
    rank_of, action_ns, last = problem.rank_of, problem.action_ns, problem.num_stages - 1
    arrived: list[list[int]] = [[] for _ in action_ns]  # by code: when its k-th input arrives
    link_free = [0] * len(action_ns)  # by sending code: when its link is free
    num_received = [0] * len(action_ns)  # by code: inputs used so far
    positions, now = [0] * len(orders), [0] * len(orders)  # by rank: the next action, and the time
    runnable = [rank for rank, codes in enumerate(orders) if codes]
    while runnable:
        rank = runnable.pop()
        # Run this device as far as its inputs allow.
        codes, position, time = orders[rank], positions[rank], now[rank]
        for code in codes[position:]:
            stage, phase = divmod(code, 3)
            if phase == 2:  # W: its I ran earlier on this device, and no other device waits for W
                begins[code].append(time)
                time += action_ns[code]
                position += 1
                continue
            if stage != (last if phase else 0):  # the first stage's F and the last stage's I receive nothing
                k = num_received[code]
                if k >= len(arrived[code]):
                    break  # not sent yet
                if arrived[code][k] > time:
                    time = arrived[code][k]
                num_received[code] = k + 1
            begins[code].append(time)
            time += action_ns[code]
            position += 1
            if stage != (0 if phase else last):
                consumer = code - 3 if phase else code + 3
                transfer = problem.return_ns[stage - 1] if phase else problem.send_ns[stage]
                arrival = time
                if transfer:
                    arrival = link_free[code] = max(time, link_free[code]) + transfer
                arrived[consumer].append(arrival)
                if rank_of[consumer // 3] != rank:
                    runnable.append(rank_of[consumer // 3])
        positions[rank], now[rank] = position, time
    # A device that stopped was never woken again: it waits for an input that is never sent.
    if any(position < len(codes) for position, codes in zip(positions, orders, strict=True)):
        return None
    return OrderTiming(begins, max(time + problem.update_ns[rank] for rank, time in enumerate(now)))
