"""A lower bound on the step of all cuts, and good cuts, from what each device has to do with its two stages.

The step of a plan is no shorter than what passes before the first action of a device, all its actions, and what follows
them. With two stages on each device the least such time over all cuts is found by bisection and a dynamic programme
(`load_programme.py`); exactly if there are few boundaries. docs/algorithm.md, "Loads of devices", has the proof.
"""

from collections.abc import Sequence
from itertools import pairwise, takewhile

import numpy as np

from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.compute.arrays import Ints
from bapipe.planner.fixed_placements.load_programme import Loads, reach_every_state, reach_furthest, trace_states
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.stages.intervals import INF
from bapipe.planner.stages.nearest_cuts import nearest_cuts
from bapipe.planner.stages.placements import StagePlacement
from bapipe.schedules import splits_backwards
from bapipe.schedules.table import Phase

LOAD_PRECISION = 1000
"""The bound is exact to one part in so many."""

MAX_STEPS = 20_000_000
"""A question looks at about so many possible ends of stages, some 20 ms: if all states would be more, at fewer."""

MAX_MIDDLES = 64
"""The most ranges of boundaries between first and second stages that are then asked about."""


class DeviceLoads:
    """The devices of a pipeline, each with one of the first stages, in order, and one of the later ones.

    Attributes:
        num_steps: at about how many possible ends of stages a question looks.
    """

    def __init__(self, problem: Problem, placements: Sequence[StagePlacement], *, knows_order: bool = True) -> None:
        """If not `knows_order`, any F may run before the first backward: the table of actions takes longer than all
        questions, and mostly says little more."""
        self._num = len(placements) // 2
        positions, own = [placement.position for placement in placements], list(range(self._num))
        # Second stages go through the devices as the first ones do, or back.
        self._is_back = positions[self._num :] == own[::-1]
        assert positions == own + (own[::-1] if self._is_back else own)
        self._splits = splits_backwards(problem.schedule)
        of_class = {c: self._of_class(problem, c) for c in {placement.device_classes[0] for placement in placements}}
        of_device = [of_class[placement.device_classes[0]] for placement in placements[: self._num]]
        forwards, backwards, updates = (np.array(of_units) for of_units in zip(*of_device, strict=True))
        self._work, self._updates = _sums(problem.num_microbatches * (forwards + backwards)), _sums(updates)
        # The work without the F before the first backward. [first or second stages][devices, boundaries]
        self._late = [
            _sums((problem.num_microbatches - early[:, None]) * forwards + problem.num_microbatches * backwards)
            for early in self._num_early(problem, knows_order)
        ]
        passed = _sums(forwards.min(axis=0))
        # Where I and W are apart, an I may take no time, and nothing has to follow a last W.
        self._returned = _sums(backwards.min(axis=0) * (not self._splits))
        sent_ns, returned_ns = self._least_transfers(problem, placements)
        cuts_before = np.arange(self._num)
        self._before = passed + cuts_before[:, None] * sent_ns
        self._behind = (self._returned + cuts_before[:, None] * returned_ns) * (not self._splits)
        num_cuts = 2 * self._num - 1 - self._is_back  # the one between two stages of a device takes no time
        cuts_later = cuts_before if self._is_back else cuts_before[::-1]
        self._trips = passed[-1] + num_cuts * sent_ns + cuts_later * returned_ns
        self._stalls = self._times_of_stalls(problem, placements, sent_ns + returned_ns)
        self._num_units = self._work.shape[1] - 1
        # (loads, units that may be missing) of each question; of second stages that go back one is enough.
        every_state = self._num_units**3 // 2
        middles = list(range(self._num, self._num_units - self._num + 1))
        self._is_exact = every_state * (1 if self._is_back else len(middles)) <= MAX_STEPS
        furthest = 2 * self._num_units**2
        self._parts: list[tuple[Loads, int]] = []
        if self._is_back:
            self._parts.append((self._loads(self._num_units, 0), 0))
        else:
            most = len(middles) if self._is_exact else min(MAX_MIDDLES, max(1, MAX_STEPS // furthest))
            ends = np.linspace(middles[0] - 1, middles[-1], min(most, len(middles)) + 1).astype(int).tolist()
            self._parts += [(self._loads(to, to), to - below - 1) for below, to in pairwise(ends)]
        self.num_steps = len(self._parts) * (every_state if self._is_exact else furthest)

    def _loads(self, most_first: int, second_from: int) -> Loads:
        """Returns the loads if first stages have up to so many units, and second ones begin behind so many."""
        later = self._of_second(self._returned, second_from)
        none = np.zeros_like(later)
        # If stages may have no units, of second stages that go back more units before a device may not be better.
        later_begin, later_end = (later * self._is_exact, none) if self._is_back else (none, later[-1] - later)
        return Loads(
            first_work=self._work,
            second_work=self._of_second(self._work, second_from),
            first_updates=self._updates,
            second_updates=self._of_second(self._updates, second_from),
            first_late=self._late[0],
            second_late=self._of_second(self._late[1], second_from),
            before=self._before,
            behind=self._behind,
            trips=self._trips,
            later_begin=later_begin,
            later_end=later_end,
            stalls=self._stalls,
            num_units=self._num_units,
            most_first=most_first,
            most_second=len(later) - 1,
        )

    def _of_second(self, sums: Ints, second_from: int) -> Ints:
        """Returns sums over the units before each boundary, in the order in which second stages have the units."""
        second = sums[..., -1:] - sums[..., ::-1] if self._is_back else sums[..., second_from:]
        return np.ascontiguousarray(second - second[..., :1])

    def _of_class(self, problem: Problem, device_class: int) -> tuple[Ints, Ints, Ints]:
        """Returns F and the backward of a micro-batch and the update, on devices of a class, at least. [units] each

        Times are rounded in each unit and in each stage, by half a nanosecond; I and W each.
        """
        costs = problem.lower_bound.costs
        times, units = costs.times[device_class].on_device, costs.intervals.row_offset[:-1]
        most_ns = INF // (4 * problem.num_microbatches * len(units))  # so that sums of a step fit in 64 bits
        return (
            np.clip(times.at(units).forward_ns - 1, 0, most_ns),
            np.clip(times.unit_backward_ns(self._splits) - 2, 0, most_ns),
            np.clip(times.at(units).update_ns - 1, 0, most_ns),
        )

    def _least_transfers(self, problem: Problem, placements: Sequence[StagePlacement]) -> tuple[int, int]:
        """Returns the least time of a micro-batch over a cut to another device, and of its gradients back."""
        if self._num < 2:
            return 0, 0
        transfers, classes = problem.lower_bound.costs.transfers, sorted({p.device_classes[0] for p in placements})
        sent_ns, returned_ns = (int(transfers.min_ns(classes, classes, way)[1:-1].min()) for way in (True, False))
        return sent_ns, returned_ns

    def _num_early(self, problem: Problem, knows_order: bool) -> Ints:
        """Returns how many F of its first, and of its second stage a device runs before any backward. [2, devices]"""
        if not knows_order:
            return np.full((2, self._num), problem.num_microbatches)
        early = np.zeros((2, self._num), dtype=np.int64)
        for k, order in enumerate(problem.placements.table(self._num).order):
            for action in takewhile(lambda action: action.phase is Phase.FORWARD, order):
                early[action.stage // self._num, k] += 1
        return early

    def _times_of_stalls(self, problem: Problem, placements: Sequence[StagePlacement], at_cut_ns: int) -> Ints:
        """Returns how long transfers occupy each device that cannot compute meanwhile, at least. [devices]

        Without the one before its first action and the one behind its last one, which count as what passes then.
        """
        stalls = np.zeros(self._num, dtype=np.int64)
        for placement, successor in pairwise(placements):
            for one, other in ((placement, successor), (successor, placement)):
                may_overlap = problem.classes[one.device_classes[0]].device.overlaps_transfers
                if one.position != other.position and not may_overlap:
                    stalls[one.position] += problem.num_microbatches * at_cut_ns
        stalls[1:] -= np.where(stalls[1:] > 0, at_cut_ns, 0)
        return stalls

    def least(self, low_ns: int, high_ns: int) -> tuple[int, Cuts]:
        """Returns a lower bound on the step of all cuts, and cuts whose devices are all within about that; () without.

        Args:
            low_ns: a lower bound that is known.
            high_ns: steps from here on are of no interest: if none is shorter, this is the bound.
        """
        cuts = self._within(high_ns - 1)
        if cuts is None:
            return max(low_ns, high_ns), ()
        while high_ns - low_ns > max(1, low_ns // LOAD_PRECISION):
            middle_ns = (low_ns + high_ns) // 2
            found = self._within(middle_ns - 1)
            if found is None:
                low_ns = middle_ns
            else:
                high_ns, cuts = middle_ns, found
        return low_ns, cuts

    def _within(self, limit_ns: int) -> Cuts | None:
        """Returns cuts with which the loads of all devices are within a limit, None if there are none.

        Unless all states are looked at, cuts may be found where there are none, which are not within the limit.
        """
        for loads, missing in self._parts:
            states = self._every_state(loads, limit_ns) if self._is_exact else self._furthest(loads, limit_ns, missing)
            if states is not None:
                first, second = (states[:, i].tolist() for i in range(2))
                begins = [self._num_units - b for b in reversed(second)] if self._is_back else second
                offset = 0 if self._is_back else loads.most_first
                inner = nearest_cuts(np.arange(self._num_units + 1), [*first[1:], *(offset + b for b in begins[1:-1])])
                return 0, *inner, self._num_units
        return None

    def _every_state(self, loads: Loads, limit_ns: int) -> Ints | None:
        """Returns states behind each number of devices within a limit, None if there are none. [devices + 1, 2]"""
        is_open = np.zeros((self._num + 1, loads.most_first + 1, loads.most_second + 1), dtype=np.int64)
        if not reach_every_state(loads, limit_ns, is_open):
            return None
        states = np.zeros((self._num + 1, 2), dtype=np.int64)
        trace_states(loads, limit_ns, is_open, states)
        return states

    def _furthest(self, loads: Loads, limit_ns: int, missing: int) -> Ints | None:
        """Returns the same with the states of the furthest second stages, some of which may have no units."""
        furthest, origin = (np.zeros((self._num + 1, loads.most_first + 1), dtype=np.int64) for _ in range(2))
        if not reach_furthest(loads, limit_ns, missing, furthest, origin):
            return None
        first = int(np.argmax(np.where(furthest[-1] >= 0, furthest[-1] + np.arange(furthest.shape[1]), -1)))
        states = [(first, int(furthest[-1, first]))]
        for k in reversed(range(self._num)):
            first = int(origin[k + 1, first])
            states.append((first, int(furthest[k, first])))
        return np.array(states[::-1])


def _sums(of_units: Ints) -> Ints:
    """Returns the sums of all units before each boundary. [..., units] -> [..., units + 1]"""
    sums = np.zeros((*of_units.shape[:-1], of_units.shape[-1] + 1), dtype=np.int64)
    np.cumsum(of_units, axis=-1, out=sums[..., 1:])
    return sums
