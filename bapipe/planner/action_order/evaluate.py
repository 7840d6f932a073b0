"""The timeline of an order in a monotone problem: the judge's figures, from one pass over the actions."""

from bapipe.planner.action_order.problem import OrderProblem, Orders

Clock = tuple[list[list[int]], int]
"""The beginnings of each code's actions, and the step time."""


def evaluate_order(problem: OrderProblem, orders: Orders) -> Clock | None:
    """Returns when everything begins and how long the step takes, or None where the order deadlocks.

    Equals the judge's where `problem.monotone`. Every transfer is taken to have a link of its own. O(n) for n actions.
    """
    begins: list[list[int]] = [[] for _ in problem.ns]
    rank_of, ns, last = problem.rank_of, problem.ns, problem.num_stages - 1
    arrived: list[list[int]] = [[] for _ in ns]  # when the k-th input of a code is here
    link_free = [0] * len(ns)  # when the link behind a code is free
    done = [0] * len(ns)
    places, now = [0] * len(orders), [0] * len(orders)
    waiting = [rank for rank, codes in enumerate(orders) if codes]
    while waiting:
        rank = waiting.pop()
        codes, place, time = orders[rank], places[rank], now[rank]
        for code in codes[place:]:
            stage, phase = divmod(code, 3)
            if phase == 2:
                begins[code].append(time)
                time += ns[code]
                place += 1
                continue
            to = code + 3 if phase == 0 else code - 3
            if stage != (last if phase else 0):
                k = done[code]
                if k >= len(arrived[code]):
                    break
                if arrived[code][k] > time:
                    time = arrived[code][k]
                done[code] = k + 1
            begins[code].append(time)
            time += ns[code]
            place += 1
            if stage != (0 if phase else last):
                transfer = problem.return_ns[stage - 1] if phase else problem.send_ns[stage]
                here = time
                if transfer:
                    here = link_free[code] = max(time, link_free[code]) + transfer
                arrived[to].append(here)
                if rank_of[to // 3] != rank:
                    waiting.append(rank_of[to // 3])
        places[rank], now[rank] = place, time
    if any(place < len(codes) for place, codes in zip(places, orders, strict=True)):
        return None
    return begins, max(time + problem.update_ns[rank] for rank, time in enumerate(now))
