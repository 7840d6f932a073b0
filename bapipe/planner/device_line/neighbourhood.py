"""Neighbours of a plan on a line of devices, and a climb along those that make the step shorter.

The moves are compiled (`moves.py`). Here they are made one at a time, for scores that are not compiled: a neighbour is
kept if its score is worse by no more than a shrinking threshold (threshold accepting, Dueck and Scheuer 1990).
"""

from collections.abc import Callable

import numpy as np

from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.search_arrays import Moves, Plan, Random
from bapipe.simulator.interval_costs import prefix_sums

WEIGHTS = (10, 6, 3, 4, 1, 1, 1)
"""Weights of the moves: cuts, cuts with devices, devices, one micro-batch less, leave spare devices, split, merge."""

CUT_WEIGHTS = (1, 0, 0, 0, 0, 0, 0)
"""The same without replicas."""

FIRST_THRESHOLD, HALVED_AFTER = 5e-4, 900
"""The relative threshold at first, and the number of neighbours after which it is halved."""

Score = Callable[[LinePlan, float], float]
"""(plan, limit) -> the score of a plan, lower is better; if it is above `limit`, any number above that."""


class Neighbourhood:
    """Plans of a line with one schedule and micro-batch size, as arrays, and moves from one to another.

    Attributes:
        most_stages: the maximum number of stages of a plan.
    """

    def __init__(self, line: DeviceLine, schedule: str, microbatch_size: int) -> None:
        from bapipe.planner.device_line.moves import draw

        self._draw = draw
        self._line, self._schedule, self._microbatch_size = line, schedule, microbatch_size
        self._boundaries = {cut: boundary for boundary, cut in enumerate(line.cuts)}
        num_devices = len(line.cluster.devices)
        self.most_stages = min(num_devices, len(line.cuts) - 1)
        profile = line.profiles[line.cluster.devices[0].kind]
        work = prefix_sums([m.forward_backward_ns for m in profile.at(microbatch_size)])[line.cuts]
        self.moves = Moves(
            num_devices=num_devices,
            num_microbatches=line.options.minibatch_size // microbatch_size,
            weights=np.array(WEIGHTS if line.options.replicas else CUT_WEIGHTS),
            devices_before=(work * (num_devices / max(1, int(work[-1])))).astype(np.float64),
        )

    def arrays(self, plan: LinePlan) -> Plan:
        """Returns a plan as arrays with room for all stages that it may have."""
        num_stages = len(plan.counts)
        cuts, counts = (np.zeros(self.most_stages + extra, dtype=np.int64) for extra in (1, 0))
        cuts[: num_stages + 1], counts[:num_stages] = [self._boundaries[cut] for cut in plan.cuts], plan.counts
        return Plan(np.array([num_stages]), cuts, counts)

    def plan(self, arrays: Plan) -> LinePlan:
        """Returns the plan that arrays hold."""
        num_stages = int(arrays.num_stages[0])
        return LinePlan(
            cuts=tuple(self._line.cuts[boundary] for boundary in arrays.cuts[: num_stages + 1].tolist()),
            counts=tuple(arrays.counts[:num_stages].tolist()),
            schedule=self._schedule,
            microbatch_size=self._microbatch_size,
        )

    def random(self, seed: int) -> Random:
        """Returns a generator of random numbers; close seeds give distant states."""
        return np.array([(seed + 1) * 0x9E3779B97F4A7C15 % 2**64], dtype=np.uint64)

    def draw(self, plan: LinePlan, random: Random) -> LinePlan:
        """Returns a random neighbour of a plan; it may not fit."""
        arrays, other = self.arrays(plan), self.arrays(plan)
        while not self._draw(self.moves, arrays, other, random):
            pass
        return self.plan(other)

    def climb(self, plan: LinePlan, score: Score, num_tries: int, may_go_on: Callable[[], bool], seed: int) -> LinePlan:
        """Returns the best plan of a threshold-accepting climb from `plan`.

        Args:
            num_tries: the climb ends after this many neighbours in a row without a new lowest score.
        """
        random, score_ns, num_worse, threshold = self.random(seed), score(plan, np.inf), 0, FIRST_THRESHOLD
        best, best_ns = plan, score_ns
        while num_worse < num_tries and may_go_on():
            other, highest_ns = self.draw(plan, random), score_ns * (1 + threshold)
            other_ns = score(other, highest_ns)
            num_worse, threshold = num_worse + 1, threshold * 0.5 ** (1 / HALVED_AFTER)
            if other_ns <= highest_ns and self._line.allows(other):
                plan, score_ns = other, other_ns
                if score_ns < best_ns:
                    best, best_ns, num_worse = plan, score_ns, 0
        return best
