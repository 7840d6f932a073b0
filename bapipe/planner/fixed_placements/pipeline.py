"""A pipeline whose placements are fixed: the times of all its cuts as vectors, paths as weights of such vectors.

A *time vector* has an entry per kind of event of the step: each phase of each replica of each stage, what each replica
does after its last action (all-reduces and update), and one transfer of each channel. It is determined by the cuts. A
*weight vector* says how often each of these occurs on a path, so the path takes weights @ times, whatever the cuts are.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bapipe.planner.branch_and_bound.intervals import INF, BoolArray, IntArray
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.branch_and_bound.search import EVENT_DRIVEN_FACTOR
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.longest_path import LongestPath
from bapipe.schedules.table import Phase
from bapipe.simulator.compiled import NUM_PHASES
from bapipe.simulator.simulate import longest_path_is_exact

INTERVALS_PER_ACTION = 20
"""Exchange rate: intervals of the dynamic programme that take as long as one simulated action."""

MAX_SUM = INF >> 1
"""Weighted sums of times stay below this, so that they fit in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageTimes:
    """A stage with each interval.

    Attributes:
        entries: its entries of the time vector. [entries, intervals]
        fits: whether its devices can hold it. [intervals]
        work_ns: F and backward of all micro-batches that a replica has at least. [intervals]
    """

    entries: IntArray
    fits: BoolArray
    work_ns: IntArray


class Pipeline:
    """A problem on one sequence of placements.

    Attributes:
        num_actions: of its schedule.
        simulation_cost: how many actions the longest path engine runs in the time of one simulation.
    """

    def __init__(self, problem: Problem, placements: tuple[StagePlacement, ...], *, in_any_order: bool = False) -> None:
        """With `in_any_order`, times are the minima over all orders of the pipeline's devices: for a lower bound."""
        self.problem, self.placements = problem, placements
        self.costs = problem.lower_bound.costs
        self._anywhere = sorted({c for p in placements for c in p.device_classes}) if in_any_order else []
        self.intervals = self.costs.intervals
        schedule, self._compiled = problem.compiled(placements)
        self.num_actions = len(self._compiled.actions)
        is_cheap = longest_path_is_exact(self._compiled, problem.cluster)
        self.simulation_cost = self.num_actions * (1 if is_cheap else EVENT_DRIVEN_FACTOR)
        self._ranks = schedule.devices
        # A replica has an entry per phase that occurs, then one for its all-reduces and update. Stage s has the entries
        # first[s] to first[s + 1] of a vector, the channels follow.
        phases = frozenset().union(*(placement.schedule.phases for placement in placements))
        self._phases = [i for i, phase in enumerate(Phase) if phase in phases]
        self._num_times = len(self._phases) + 1
        num_replicas = [placement.num_replicas for placement in placements]
        self._first = [0, *np.cumsum([self._num_times * count for count in num_replicas]).tolist()]
        self._stages = self._make_stages()
        self._transfers = self._times_of_transfers()
        # The channels whose transfers happen at the end of each stage.
        self._channels_after: list[list[int]] = [[] for _ in placements]
        for channel, (_, _, stage, is_forward) in enumerate(self._compiled.channels):
            self._channels_after[stage if is_forward else stage - 1].append(channel)
        self._path = LongestPath(self._compiled, self._queues())
        # The maximum of each entry over all cuts.
        self._maxima = [int(each.max()) for stage in self._stages for each in stage.entries]
        self._maxima += [int(times.max()) for times in self._transfers]
        self._rows = [np.flatnonzero(stage.fits) for stage in self._stages]

    def _make_stages(self) -> list[_StageTimes]:
        shared: dict[Hashable, _StageTimes] = {}
        stages = []
        for placement in self.placements:
            buffers = placement.receives_activations, placement.receives_gradients
            key = (placement.device_classes, placement.schedule, buffers)
            if key not in shared:
                self.problem.deadline.check()
                shared[key] = self._stage_times(placement)
            stages.append(shared[key])
        return stages

    def _stage_times(self, placement: StagePlacement) -> _StageTimes:
        if not self._anywhere:
            return self._stage_times_on(placement)
        # On whichever device takes the least time for each interval.
        on_each = [self._stage_times_on(placement.on((c,) * placement.num_replicas)) for c in self._anywhere]
        return _StageTimes(
            entries=np.minimum.reduce([each.entries for each in on_each]),
            fits=np.logical_or.reduce([each.fits for each in on_each]),
            work_ns=np.minimum.reduce([each.work_ns for each in on_each]),
        )

    def _stage_times_on(self, placement: StagePlacement) -> _StageTimes:
        candidates = self.costs.candidates(placement, slice(None))
        again_ns = self.costs.recomputed_ns(placement, slice(None)) if candidates.recompute.any() else {}
        entries = []
        for k, c in enumerate(placement.device_classes):
            plain = self._entries(placement, k, 0, on_device=False)
            if again_ns:  # F is repeated in B and in I; the host's times do not count then
                again = np.where(candidates.recompute, again_ns[c], 0)
                repeated = self._entries(placement, k, again, on_device=True)
                plain = [np.where(candidates.recompute, *both) for both in zip(repeated, plain, strict=True)]
            entries += plain
        num_microbatches = self.problem.num_microbatches // placement.num_replicas
        return _StageTimes(
            entries=np.stack(entries), fits=candidates.fits, work_ns=num_microbatches * candidates.microbatch_ns
        )

    def _entries(
        self, placement: StagePlacement, k: int, again_ns: IntArray | int, *, on_device: bool
    ) -> list[IntArray]:
        """The entries of the k-th replica in the time vector, with `again_ns` more in B and I. [entries][intervals]"""
        times = self.costs.times[placement.device_classes[k]]
        times = times.on_device if on_device else times
        by_phase = (
            times.forward_ns,
            times.backward_ns + again_ns,
            times.input_grad_ns + again_ns,
            times.weight_grad_ns,
        )
        sync_ns = self.costs.replica_cost(placement, k, slice(None), on_device=on_device).sync_ns
        return [*(by_phase[i] for i in self._phases), sync_ns]

    def _times_of_transfers(self) -> list[IntArray]:
        """Per channel the time of one transfer at each boundary. [channels][boundaries]"""
        class_of = {
            rank: c
            for placement, ranks in zip(self.placements, self._ranks, strict=True)
            for rank, c in zip(ranks, placement.device_classes, strict=True)
        }
        return [
            self.costs.min_transfer_ns(
                self._anywhere or [class_of[channel.source]],
                self._anywhere or [class_of[channel.target]],
                channel.forward,
            )
            for channel in self._compiled.channels
        ]

    def _queues(self) -> list[bool]:
        """Whether transfers of each channel wait for those before them on their link; the same for all device orders.

        Those of a channel that has its link alone do, as none overtakes another. Where channels share a link, transfers
        must not become ready at once: that is so if they and all actions before them take time at every cut.
        """
        classes = sorted({c for placement in self.placements for c in placement.device_classes})
        units = self.intervals.row_offset[:-1]  # the shortest intervals; longer ones take as long or longer
        times = [self.costs.times[c] for c in classes]
        sending = [ns for t in times for ns in (t.forward_ns[units], t.backward_ns[units], t.unit_input_grad_ns())]
        all_take_time = all((ns > 0).all() for ns in sending)
        channels = self._compiled.channels
        takes_time = {
            forward: all_take_time and bool((self.costs.min_transfer_ns(classes, classes, forward)[1:-1] > 0).all())
            for forward in {channel.forward for channel in channels}
        }
        may_overtake = self._compiled.may_queue
        return [takes_time[channel.forward] or not may_overtake[c] for c, channel in enumerate(channels)]

    def time_vectors(self, cuts: Sequence[Cuts] | IntArray) -> tuple[IntArray, BoolArray]:
        """Returns the time vectors of several cuts, and which of them fit by the bounds' count. [n, entries], [n]"""
        boundaries = np.asarray(cuts)
        begins, ends = boundaries[:, :-1], boundaries[:, 1:]
        at = self.intervals.row_offset[begins] + ends - begins - 1
        columns = [stage.entries[:, at[:, s]].T for s, stage in enumerate(self._stages)]
        columns += [
            times[ends[:, channel.stage if channel.forward else channel.stage - 1]][:, None]
            for times, channel in zip(self._transfers, self._compiled.channels, strict=True)
        ]
        fits = np.logical_and.reduce([stage.fits[at[:, s]] for s, stage in enumerate(self._stages)])
        return np.concatenate(columns, axis=1), fits

    def stage_fits(self, s: int) -> BoolArray:
        """Returns which intervals a stage can hold. [intervals]"""
        return self._stages[s].fits

    def stage_entries(self, s: int) -> tuple[IntArray, slice]:
        """Returns the entries of a stage in time vectors, with each interval, and where. [entries, intervals]"""
        return self._stages[s].entries, slice(self._first[s], self._first[s + 1])

    def transfers_after(self, s: int) -> tuple[IntArray, IntArray]:
        """Returns the entries of the transfers at each end of a stage, and where. [channels, boundaries], [channels]"""
        channels = self._channels_after[s]
        times = [self._transfers[channel] for channel in channels]
        none = np.zeros((0, self.intervals.num_boundaries), dtype=np.int64)
        return np.stack(times) if times else none, self._first[-1] + np.array(channels, dtype=np.int64)

    def longest_path(self, times: IntArray) -> tuple[int, IntArray]:
        """Returns the length of the longest path, and its weights. [entries] -> [entries]"""
        last = self._first[-1]
        per_replica = times[:last].reshape(-1, self._num_times)
        tail_ns = [0] * self._compiled.num_ranks
        replicas = [(rank, s) for s, ranks in enumerate(self._ranks) for rank in ranks]
        for (rank, _), sync_ns in zip(replicas, per_replica[:, -1].tolist(), strict=True):
            tail_ns[rank] += sync_ns
        durations = np.zeros((len(per_replica), NUM_PHASES), dtype=np.int64)
        durations[:, self._phases] = per_replica[:, :-1]
        length, counts, transfers, last_rank = self._path.find(
            durations.ravel().tolist(), times[last:].tolist(), tail_ns
        )
        weights = np.zeros(len(times), dtype=np.int64)
        by_replica = weights[:last].reshape(-1, self._num_times)
        by_replica[:, :-1] = np.array(counts).reshape(-1, NUM_PHASES)[:, self._phases]
        by_replica[:, -1] = [rank == last_rank for rank, _ in replicas]
        weights[last:] = transfers
        return length, weights

    def lengths(self, times: IntArray) -> IntArray:
        """Returns the lengths of the longest paths of several time vectors. [n, entries] -> [n]"""
        last = self._first[-1]
        per_replica = times[:, :last].reshape(len(times), -1, self._num_times)
        tail_ns = np.zeros((self._compiled.num_ranks, len(times)), dtype=np.int64)
        for replica, rank in enumerate(rank for ranks in self._ranks for rank in ranks):
            tail_ns[rank] += per_replica[:, replica, -1]
        durations = np.zeros((per_replica.shape[1], NUM_PHASES, len(times)), dtype=np.int64)
        durations[:, self._phases] = per_replica[:, :, :-1].transpose(1, 2, 0)
        return self._path.lengths(durations.reshape(-1, len(times)), times[:, last:].T.copy(), tail_ns)

    def forbid_slow(self, limit_ns: int) -> None:
        """Leaves out the intervals whose work alone takes a step as long as a limit."""
        self._rows = [
            rows[stage.work_ns[rows] < limit_ns] for rows, stage in zip(self._rows, self._stages, strict=True)
        ]

    def min_cuts(self, weights: IntArray) -> tuple[int, Cuts] | None:
        """Returns the minimum of weights @ times over all cuts that are left, and cuts that attain it; None if none is.

        A dynamic programme from the last stage to the first, O(stages * intervals).
        """
        num_boundaries = self.intervals.num_boundaries
        to_go = np.full(num_boundaries, INF)
        to_go[-1] = 0
        values: list[IntArray] = []
        for s in reversed(range(len(self.placements))):
            if s + 1 < len(self.placements):
                for channel in self._channels_after[s]:
                    to_go = to_go + weights[self._first[-1] + channel] * self._transfers[channel]
            rows = self._rows[s]
            stage_weights = weights[self._first[s] : self._first[s + 1]]
            value = to_go[self.intervals.ends[rows]]
            for i in np.flatnonzero(stage_weights):
                value = value + stage_weights[i] * self._stages[s].entries[i, rows]
            values.append(value)
            to_go = np.full(num_boundaries, INF)
            if len(rows):
                begins = self.intervals.begins[rows]
                starts = np.flatnonzero(np.diff(begins, prepend=-1))  # rows ascend by begin
                to_go[begins[starts]] = np.minimum(np.minimum.reduceat(value, starts), INF)
        if to_go[0] >= INF:
            return None
        cuts = [0]
        for s, value in enumerate(reversed(values)):
            begin_rows = self._rows[s]
            begins = self.intervals.begins[begin_rows]
            low, high = np.searchsorted(begins, [cuts[-1], cuts[-1] + 1])
            cuts.append(int(self.intervals.ends[begin_rows[low + np.argmin(value[low:high])]]))
        return int(to_go[0]), tuple(cuts)

    @property
    def min_cuts_cost(self) -> int:
        """The cost of `min_cuts` in simulated actions."""
        return sum(map(len, self._rows)) // INTERVALS_PER_ACTION

    def max_sum(self, weights: IntArray) -> int:
        """Returns an upper bound of weights @ times over all cuts."""
        return sum(weight * longest for weight, longest in zip(weights.tolist(), self._maxima, strict=True))

    def step_ns(self, cuts: Cuts) -> int | None:
        """Returns the simulated step time, None if it does not fit."""
        for placement, (begin, end) in zip(self.placements, pairwise(cuts), strict=True):
            if not self.costs.candidates_from(placement, begin).fits[end - begin - 1]:
                return None
        layout = self.problem.layout(cuts, self.placements)
        return self.problem.step_ns(layout) if self.problem.fits(layout) else None
