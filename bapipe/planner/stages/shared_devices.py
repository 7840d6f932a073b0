"""The recomputed layers of devices with several stages, which share the memory of their device.

The layers of all stages of a device are chosen together: at first those with the least forward time with which the
stages fit. But the step time also depends on where in the step these forwards are repeated. The length of a path
through actions and transfers is a weighted sum of their times. So the layers that minimize this sum give a lower bound
on the step with any choice of layers, and they are the next choice to be simulated. Its longest path gives the next
weights, and so on, until the best step equals the bound, or for a few rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil

from bapipe.formats.cluster import Cluster
from bapipe.planner.stages.intervals import INF
from bapipe.planner.stages.longest_path import LongestPath, make_longest_path
from bapipe.planner.stages.recomputation import DeviceLimit, LayerChoice
from bapipe.schedules.table import Phase, Schedule, stages_of_ranks
from bapipe.simulator.compiled import NUM_PHASES, CompiledSchedule
from bapipe.simulator.in_flight import RETURNED, TAKEN, InFlight
from bapipe.simulator.memory import peak_memory
from bapipe.simulator.simulate import stage_durations, transfer_times
from bapipe.simulator.stage import Stage, received_bytes
from bapipe.units import decimal

MAX_ROUNDS = 4
"""Maximum number of choices that are simulated."""

BACKWARDS = tuple(i for i, phase in enumerate(Phase) if phase in (Phase.BACKWARD, Phase.INPUT_GRAD))
"""The phases that begin with running the recomputed layers again, by their index in `Phase`."""

State = tuple[int, tuple[InFlight, ...]]
"""A state of a device: the stage whose action runs, and what each stage of the device has in flight."""

LayersOfStages = tuple[frozenset[int], ...]
"""The numbers of the layers that each stage recomputes. [stages]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedChoice:
    """The recomputed layers of stages that share devices.

    Attributes:
        recompute: the layers that each stage recomputes.
        fits: False if it is proven that no choice makes the stages fit.
        is_best: whether it is proven that no other choice is faster.
        bound_ns: a lower bound on the step with any choice that makes the stages fit.
    """

    recompute: LayersOfStages
    fits: bool = True
    is_best: bool = True
    bound_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeastChoice:
    """The choice of layers with the least weighted sum of F.

    Attributes:
        recompute: the layers that each stage recomputes; all layers on a device for which no choice was found.
        total_ns: a lower bound on the weighted sum, at the speeds of the devices.
        fits: whether a choice that fits was found for every device.
        is_best: whether no other choice has a smaller sum; if not `fits`, whether there is no choice that fits.
    """

    recompute: LayersOfStages
    total_ns: int
    fits: bool
    is_best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """A path through a step.

    Attributes:
        plain_ns: its length if nothing is recomputed.
        num_backwards: how many B and I of each stage are on it. [stages]
    """

    plain_ns: int
    num_backwards: tuple[int, ...]


class SharedDevices:
    """Chooses the recomputed layers for one schedule on devices with several stages each."""

    def __init__(
        self,
        schedule: Schedule,
        compiled: CompiledSchedule,
        cluster: Cluster,
        limits: Mapping[int, int],
        choice: LayerChoice,
    ) -> None:
        """`limits` are the bytes that each rank in use may hold; `choice` solves the knapsacks."""
        self._schedule, self._compiled, self._cluster = schedule, compiled, cluster
        self._limits, self._choice = limits, choice
        self._own = stages_of_ranks(schedule)
        columns = zip(compiled.durations, compiled.channel_of, strict=True)
        self._sending = {duration for duration, channel in columns if channel >= 0}

    @cached_property
    def _states(self) -> dict[int, tuple[State, ...]]:
        """The Pareto-maximal states of each rank in use."""
        return {rank: _peaks(self._schedule, rank, self._own[rank]) for rank in self._limits}

    @cached_property
    def _paths(self) -> dict[bool, LongestPath]:
        """The graph for longest paths, by whether transfers are known never to overtake one another on a link."""
        return {
            in_order: make_longest_path(
                self._compiled, [in_order or not may_queue for may_queue in self._compiled.may_queue]
            )
            for in_order in (False, True)
        }

    def choose(
        self,
        intervals: Sequence[tuple[int, int]],
        stages_with: Callable[[LayersOfStages], Sequence[Stage]],
        step_ns: Callable[[Sequence[Stage]], int],
    ) -> SharedChoice:
        """Returns the layers that the stages recompute; none on devices that can hold their stages without.

        Args:
            intervals: (begin, end) of the layers of each stage.
            stages_with: makes the stages, given the layers that each of them recomputes.
            step_ns: simulates a step of some stages.
        """
        nothing = (frozenset[int](),) * len(intervals)
        plain = stages_with(nothing)
        limits = self._limits_of_stashes(plain)
        if not limits:
            return SharedChoice(recompute=nothing)
        bound_ns = self._longest_path(plain, plain).plain_ns
        choice = self._least_choice(limits, intervals, plain, [1] * len(intervals))
        if not choice.fits:
            return SharedChoice(
                recompute=choice.recompute, fits=not choice.is_best, is_best=choice.is_best, bound_ns=bound_ns
            )
        best, best_ns = choice.recompute, INF
        paths: list[_Path] = []
        for _ in range(MAX_ROUNDS):
            stages = stages_with(choice.recompute)
            found_ns = step_ns(stages)
            if found_ns < best_ns:
                best, best_ns = choice.recompute, found_ns
            paths.append(self._longest_path(stages, plain))
            # As the length of each path is a lower bound on the step, so is the mean over several paths.
            weights = [sum(counts) for counts in zip(*(path.num_backwards for path in paths), strict=True)]
            following = self._least_choice(limits, intervals, plain, weights)
            length_ns = sum(path.plain_ns for path in paths) + following.total_ns
            if not self._choice.has_host_times:  # with these, repeated F may add less than the device's time
                bound_ns = max(bound_ns, -(-length_ns // len(paths)))
            if bound_ns >= best_ns or not following.fits or following.recompute == choice.recompute:
                break
            choice = following
        return SharedChoice(recompute=best, is_best=bound_ns >= best_ns, bound_ns=bound_ns)

    def _limits_of_stashes(self, plain: Sequence[Stage]) -> dict[int, tuple[DeviceLimit, ...]]:
        """Returns the limits of each rank that cannot hold its stages without recomputation."""
        peaks = peak_memory(self._schedule, plain)
        found = {}
        for rank, limit in self._limits.items():
            if peaks[rank].total > limit:
                room = limit - (peaks[rank].total - peaks[rank].stash - peaks[rank].workspace)
                found[rank] = _binding({_limit_of(state, self._own[rank], plain, room) for state in self._states[rank]})
        return found

    def _least_choice(
        self,
        limits: Mapping[int, Sequence[DeviceLimit]],
        intervals: Sequence[tuple[int, int]],
        plain: Sequence[Stage],
        weights: Sequence[int],
    ) -> _LeastChoice:
        """Returns the layers with the least sum of F on each rank, F of each stage multiplied by its weight."""
        recompute = [frozenset[int]()] * len(intervals)
        total_ns, fits, is_best = 0, True, True
        for rank, of_rank in limits.items():
            own, device = self._own[rank], self._cluster.devices[rank]
            found = self._choice.best_together(
                [intervals[s] for s in own],
                of_rank,
                device.kind,
                input_bytes=[received_bytes(plain[s - 1], plain[s]) if s else 0 for s in own],
                weights=[weights[s] for s in own],
            )
            if not found.fits:
                fits = False
                if found.is_best:  # no choice makes the stages fit on this device
                    nothing = (frozenset[int](),) * len(intervals)
                    return _LeastChoice(recompute=nothing, total_ns=0, fits=False, is_best=True)
            is_best &= found.is_best
            if found.is_best:
                total_ns += _at_speed(found.total_ns, device.speed, sum(weights[s] for s in own))
            for s in own:
                layers = frozenset(range(*intervals[s]))
                # If no choice was found, the frontiers may have been cut: recomputing all layers may still fit.
                recompute[s] = found.layers & layers if found.fits else layers
        return _LeastChoice(recompute=tuple(recompute), total_ns=total_ns, fits=fits, is_best=is_best)

    def _longest_path(self, stages: Sequence[Stage], plain: Sequence[Stage]) -> _Path:
        """Returns the longest path of a step of `stages`; `plain` are the same stages without recomputation."""
        with_ns, plain_ns = stage_durations(stages), stage_durations(plain)
        transfer_ns = transfer_times(self._compiled, plain, self._cluster)
        tail_ns = [sum(plain[s].costs[0].update_ns for s in own) for own in self._own]
        # All transfers of a link come from one device. If all its actions take time, no two become ready at once.
        in_order = all(plain_ns[i] for i in self._sending) and all(transfer_ns)
        length_ns, counts, _, _ = self._paths[in_order].find(with_ns, transfer_ns, tail_ns)
        again_ns = sum(count * (a - b) for count, a, b in zip(counts, with_ns, plain_ns, strict=True))
        return _Path(
            plain_ns=length_ns - again_ns,
            num_backwards=tuple(sum(counts[NUM_PHASES * s + i] for i in BACKWARDS) for s in range(len(stages))),
        )


def _at_speed(total_ns: int, speed: float, weight: int) -> int:
    """Returns a lower bound on a sum of times, each divided by the speed and rounded half up.

    Args:
        total_ns: the sum at speed 1.
        weight: how many times there are.
    """
    if speed == 1.0:
        return total_ns
    return max(0, ceil(total_ns / decimal(speed) - Fraction(weight, 2)))


def _limit_of(state: State, own: Sequence[int], stages: Sequence[Stage], room_bytes: int) -> DeviceLimit:
    """Returns a state as a limit on the stashes of the device's stages.

    Args:
        own: the stages of the device.
        room_bytes: what is left for stashes, workspace and what I leaves for W.
    """
    running, in_flight = state
    left_for_w = sum(
        of.before_weight_grad * stages[s].costs[0].gradient_stash_bytes for s, of in zip(own, in_flight, strict=True)
    )
    return DeviceLimit(
        kept=tuple(of.kept for of in in_flight),
        in_backward=tuple(of.in_backward for of in in_flight),
        room_bytes=room_bytes - left_for_w - stages[running].costs[0].workspace_bytes,
    )


def _binding(limits: set[DeviceLimit]) -> tuple[DeviceLimit, ...]:
    """Returns the limits that no other implies. A limit with no less in flight and no more room implies another."""
    return tuple(
        limit
        for limit in limits
        if not any(
            other != limit
            and other.room_bytes <= limit.room_bytes
            and all(a >= b for a, b in zip(other.kept, limit.kept, strict=True))
            and all(a >= b for a, b in zip(other.in_backward, limit.in_backward, strict=True))
            for other in limits
        )
    )


def _peaks(schedule: Schedule, rank: int, own: Sequence[int]) -> tuple[State, ...]:
    """Returns the Pareto-maximal states of a rank, for the actions of each of its stages `own`."""
    in_flight = dict.fromkeys(own, InFlight(0, 0, 0))
    states: set[State] = set()
    for stage, phase, _ in schedule.order[rank]:
        in_flight[stage] = InFlight(*map(int.__add__, in_flight[stage], TAKEN[phase]))
        states.add((stage, tuple(in_flight.values())))
        in_flight[stage] = InFlight(*map(int.__sub__, in_flight[stage], RETURNED[phase]))
    peaks: list[State] = []
    for state in sorted(states, reverse=True):  # lexicographically descending: only earlier ones can hold more
        if not any(_holds_no_less(other, state) for other in peaks):
            peaks.append(state)
    return tuple(peaks)


def _holds_no_less(one: State, other: State) -> bool:
    """Returns whether both states run the same stage and the first has no less in flight of any stage."""
    return one[0] == other[0] and all(
        a >= b for ours, theirs in zip(one[1], other[1], strict=True) for a, b in zip(ours, theirs, strict=True)
    )
