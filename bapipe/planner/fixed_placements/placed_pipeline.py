"""A pipeline whose placements are fixed: the times of its cuts as vectors, and paths as weights of such vectors.

The *time vector* of some cuts has an entry in ns for each kind of event in a step: each phase of each replica of each
stage, the all-reduces and update of each replica, and a transfer of each channel. The *weight vector* of a path says
how often each of these occurs on the path; it does not depend on the cuts. So the path takes weights @ times.
"""

from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np

from bapipe.planner.branch_and_bound.problem import Layout, Problem
from bapipe.planner.branch_and_bound.search import EVENT_DRIVEN_FACTOR
from bapipe.planner.compute.arrays import Floats
from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.fixed_placements.stage_times import StageTable, StageTimes
from bapipe.planner.stages.intervals import INF, BoolArray, IntArray
from bapipe.planner.stages.longest_path import make_longest_path
from bapipe.planner.stages.placements import StagePlacement
from bapipe.schedules.table import Phase
from bapipe.simulator.compiled import NUM_PHASES
from bapipe.simulator.simulate import longest_path_is_exact

INTERVALS_PER_ACTION = 20
"""How many intervals of the dynamic programme take as long as one simulated action."""

QUEUE_FACTOR = 4
"""How many times as long as the longest path the engine takes in which only links have queues."""

VECTORS_COST = 100
"""How many simulated actions take as long as computing one stage's part of hundreds of time vectors."""

MAX_ENTRIES = 20_000_000
"""Most entries of the tables of pipelines, the times of all replicas with all intervals, that a search makes."""

ROUNDED_UP = 1 + 2**-30
"""More than what rounding can take from a sum of millions of floats."""

MAX_SUM = INF >> 1
"""Weighted sums of times stay below this, so that they fit in 64 bits."""


class PlacedPipeline:
    """A problem on one sequence of placements.

    Attributes:
        num_actions: the number of actions of its schedule.
        path_cost: the cost of `longest_path`, in simulated actions.
        simulation_cost: the cost of a simulation, in actions of the longest-path engine.
    """

    def __init__(self, problem: Problem, placements: tuple[StagePlacement, ...], *, in_any_order: bool = False) -> None:
        """With `in_any_order`, times are minima over the pipeline's device classes: for bounds on all orders."""
        self.problem, self.placements = problem, placements
        self.costs = problem.lower_bound.costs
        self._any_of_classes = sorted({c for p in placements for c in p.device_classes}) if in_any_order else []
        self.intervals = self.costs.intervals
        schedule, self._compiled = problem.compiled(placements)
        self.num_actions = len(self._compiled.actions)
        is_cheap = longest_path_is_exact(self._compiled, problem.cluster)
        may_stall = not all(device.overlaps_transfers for device in problem.cluster.devices)
        self.simulation_cost = self.num_actions * (
            1 if is_cheap else EVENT_DRIVEN_FACTOR if may_stall else QUEUE_FACTOR
        )
        self._ranks = schedule.devices
        # Each replica has an entry per phase that occurs, then one for its all-reduces and update. Stage s has the
        # entries [_first_entry[s], _first_entry[s + 1]); those of the channels follow.
        phases = frozenset().union(*(placement.schedule.phases for placement in placements))
        self._phases = [i for i, phase in enumerate(Phase) if phase in phases]
        self._entries_per_replica = len(self._phases) + 1
        num_replicas = [placement.num_replicas for placement in placements]
        self._first_entry = [0, *np.cumsum([self._entries_per_replica * count for count in num_replicas]).tolist()]
        self._stages = self._make_stages()
        self._limit_ns, self._tables = INF, list[StageTable]()
        self._transfers = self._times_of_transfers()
        # The channels whose transfers cross the cut at the end of each stage. [stages]
        self._channels_after: list[list[int]] = [[] for _ in placements]
        for channel, (_, _, stage, is_forward) in enumerate(self._compiled.channels):
            self._channels_after[stage if is_forward else stage - 1].append(channel)
        self._path = make_longest_path(self._compiled, self._queues())
        self.path_cost = self._path.cost
        self._fastest_ns = INF
        self._fastest: tuple[Cuts, Layout] | None = None

    def _make_stages(self) -> list[StageTimes]:
        """Returns the times of each stage; equal stages share them. [stages]"""
        shared: dict[Hashable, StageTimes] = {}
        stages = []
        for placement in self.placements:
            buffers = placement.receives_activations, placement.receives_gradients
            key = (placement.device_classes, placement.schedule, buffers)
            if key not in shared:
                shared[key] = StageTimes(
                    self.costs,
                    placement,
                    self._phases,
                    self.problem.num_microbatches,
                    self._any_of_classes,
                    self.problem.deadline,
                )
            stages.append(shared[key])
        return stages

    def _times_of_transfers(self) -> list[IntArray]:
        """Returns the time of a transfer of each channel, if its cut is at each boundary. [channels][boundaries]"""
        class_of = {
            rank: c
            for placement, ranks in zip(self.placements, self._ranks, strict=True)
            for rank, c in zip(ranks, placement.device_classes, strict=True)
        }
        return [
            self.costs.transfers.min_ns(
                self._any_of_classes or [class_of[channel.source]],
                self._any_of_classes or [class_of[channel.target]],
                channel.forward,
            )
            for channel in self._compiled.channels
        ]

    def _queues(self) -> list[bool]:
        """Returns whether transfers of each channel wait for earlier ones on their link, at all cuts. [channels]

        If a channel has its link to itself they do, because none overtakes another. If channels share a link, they do
        if no two transfers become ready at once: if all transfers, and all actions that send, take time at every cut.
        """
        classes = sorted({c for placement in self.placements for c in placement.device_classes})
        units = self.intervals.row_offset[:-1]  # the shortest intervals; longer ones take no less
        sending = []
        for times in (self.costs.times[c] for c in classes):
            at = times.at(units)
            sending += [at.forward_ns, at.backward_ns, times.unit_input_grad_ns()]
        all_take_time = all((ns > 0).all() for ns in sending)
        channels = self._compiled.channels
        takes_time = {
            forward: all_take_time and bool((self.costs.transfers.min_ns(classes, classes, forward)[1:-1] > 0).all())
            for forward in {channel.forward for channel in channels}
        }
        may_overtake = self._compiled.may_queue
        return [takes_time[channel.forward] or not may_overtake[c] for c, channel in enumerate(channels)]

    def time_vectors(self, cuts: Sequence[Cuts] | IntArray) -> tuple[IntArray, BoolArray]:
        """Returns the time vectors of several cuts, and which cuts fit by the memory check of the search.

        [n, stages + 1] -> [n, entries], [n]
        """
        boundaries = np.asarray(cuts)
        begins, ends = boundaries[:, :-1], boundaries[:, 1:]
        at = self.intervals.row_offset[begins] + ends - begins - 1
        of_stages = [stage.at(at[:, s]) for s, stage in enumerate(self._stages)]
        columns = [entries.T for entries, _ in of_stages]
        columns += [
            times[ends[:, channel.stage if channel.forward else channel.stage - 1]][:, None]
            for times, channel in zip(self._transfers, self._compiled.channels, strict=True)
        ]
        fits = np.logical_and.reduce([of_stage for _, of_stage in of_stages])
        return np.concatenate(columns, axis=1), fits

    def stage_fits(self, s: int) -> BoolArray:
        """Returns which intervals stage s can hold. [intervals]"""
        return self._stages[s].every.fits

    def stage_entries(self, s: int) -> tuple[IntArray, slice]:
        """Returns the entries of stage s for each interval, and their slice in time vectors. [entries, intervals]"""
        return self._stages[s].every.entries, slice(self._first_entry[s], self._first_entry[s + 1])

    def transfers_after(self, s: int) -> tuple[IntArray, IntArray]:
        """Returns the times of transfers at each end of stage s, and their indices in time vectors.

        [channels, boundaries], [channels]
        """
        channels = self._channels_after[s]
        times = [self._transfers[channel] for channel in channels]
        none = np.zeros((0, self.intervals.num_boundaries), dtype=np.int64)
        return np.stack(times) if times else none, self._first_entry[-1] + np.array(channels, dtype=np.int64)

    def longest_path(self, times: IntArray) -> tuple[int, IntArray]:
        """Returns the length in ns and the weights of the longest path of a time vector. [entries] -> [entries]"""
        last = self._first_entry[-1]
        per_replica = times[:last].reshape(-1, self._entries_per_replica)
        tail_ns = [0] * self._compiled.num_ranks
        replicas = [(rank, s) for s, ranks in enumerate(self._ranks) for rank in ranks]
        for (rank, _), after_last_ns in zip(replicas, per_replica[:, -1].tolist(), strict=True):
            tail_ns[rank] += after_last_ns
        durations = np.zeros((len(per_replica), NUM_PHASES), dtype=np.int64)
        durations[:, self._phases] = per_replica[:, :-1]
        length, counts, transfers, last_rank = self._path.find(
            durations.ravel().tolist(), times[last:].tolist(), tail_ns
        )
        weights = np.zeros(len(times), dtype=np.int64)
        by_replica = weights[:last].reshape(-1, self._entries_per_replica)
        by_replica[:, :-1] = np.array(counts).reshape(-1, NUM_PHASES)[:, self._phases]
        by_replica[:, -1] = [rank == last_rank for rank, _ in replicas]
        weights[last:] = transfers
        return length, weights

    def lengths(self, times: IntArray) -> IntArray:
        """Returns the lengths of the longest paths of several time vectors. [n, entries] -> [n]"""
        last = self._first_entry[-1]
        per_replica = times[:, :last].reshape(len(times), -1, self._entries_per_replica)
        tail_ns = np.zeros((self._compiled.num_ranks, len(times)), dtype=np.int64)
        for replica, rank in enumerate(rank for ranks in self._ranks for rank in ranks):
            tail_ns[rank] += per_replica[:, replica, -1]
        durations = np.zeros((per_replica.shape[1], NUM_PHASES, len(times)), dtype=np.int64)
        durations[:, self._phases] = per_replica[:, :, :-1].transpose(1, 2, 0)
        return self._path.lengths(durations.reshape(-1, len(times)), times[:, last:].T.copy(), tail_ns)

    def forbid_slow(self, limit_ns: int) -> None:
        """Excludes intervals with so much work that a step takes `limit_ns` or more; see `min_cuts`."""
        if limit_ns < self._limit_ns:
            self._limit_ns = limit_ns
            self._tables = [table.only(table.work_ns < limit_ns) for table in self._tables]

    def _remaining_tables(self) -> list[StageTable]:
        """Returns the table of each stage: the intervals that fit and are not excluded. Made when first needed."""
        if not self._tables:
            tables: dict[StageTimes, StageTable] = {}
            for stage in self._stages:
                if stage not in tables:
                    tables[stage] = stage.faster_than(self._limit_ns)
            self._tables = [tables[stage] for stage in self._stages]
        return self._tables

    def min_cuts(self, weights: IntArray) -> tuple[int, Cuts] | None:
        """Returns the minimum of weights @ times over all cuts that fit and are not excluded, and cuts that attain it.

        None if there are no such cuts. A dynamic programme from the last stage to the first, O(stages * intervals).
        """
        num_boundaries = self.intervals.num_boundaries
        to_go = np.full(num_boundaries, INF)
        to_go[-1] = 0
        tables, values = self._remaining_tables(), list[IntArray]()
        for s in reversed(range(len(self.placements))):
            if s + 1 < len(self.placements):
                for channel in self._channels_after[s]:
                    to_go = to_go + weights[self._first_entry[-1] + channel] * self._transfers[channel]
            table = tables[s]
            stage_weights = weights[self._first_entry[s] : self._first_entry[s + 1]]
            value = to_go[self.intervals.ends[table.rows]]
            for i in np.flatnonzero(stage_weights):
                value = value + stage_weights[i] * table.entries[i]
            values.append(value)
            to_go = np.full(num_boundaries, INF)
            if len(table.rows):
                begins = self.intervals.begins[table.rows]
                starts = np.flatnonzero(np.diff(begins, prepend=-1))  # rows ascend by begin
                to_go[begins[starts]] = np.minimum(np.minimum.reduceat(value, starts), INF)
        if to_go[0] >= INF:
            return None
        cuts = [0]
        for s, value in enumerate(reversed(values)):
            begin_rows = tables[s].rows
            begins = self.intervals.begins[begin_rows]
            low, high = np.searchsorted(begins, [cuts[-1], cuts[-1] + 1])
            cuts.append(int(self.intervals.ends[begin_rows[low + np.argmin(value[low:high])]]))
        return int(to_go[0]), tuple(cuts)

    def lengths_cost(self, num: int) -> int:
        """Returns the cost of `time_vectors` and `lengths` for some cuts, up to hundreds, in simulated actions."""
        return self._path.lengths_cost(num) + self._vectors_cost

    @property
    def _vectors_cost(self) -> int:
        """The cost of `time_vectors` for hundreds of cuts, in simulated actions: 0 if they come from tables."""
        return VECTORS_COST * sum(not stage.is_tabled for stage in self._stages)

    @property
    def min_cuts_cost(self) -> int:
        """The cost of `min_cuts` in simulated actions."""
        return sum(len(table.rows) for table in self._remaining_tables()) // INTERVALS_PER_ACTION

    @cached_property
    def _maxima(self) -> Floats:
        """Upper bounds on the entries of time vectors, over all cuts. [entries]"""
        of_stages = [longest for stage in self._stages for longest in stage.maxima()]
        return np.array(of_stages + [int(times.max()) for times in self._transfers], dtype=np.float64)

    def max_sum(self, weights: IntArray) -> float:
        """Returns an upper bound on weights @ times over all cuts, in floats, as sums may not fit in 64 bits."""
        return float(weights.astype(np.float64) @ self._maxima) * ROUNDED_UP

    def step_ns(self, cuts: Cuts) -> int | None:
        """Returns the simulated step time of some cuts; None if they do not fit."""
        _, fits = self.time_vectors([cuts])
        if not fits[0]:
            return None
        layout = self.problem.layout(cuts, self.placements)
        if not self.problem.fits(layout):
            return None
        step_ns = self.problem.step_ns(layout)
        if step_ns < self._fastest_ns:
            self._fastest_ns, self._fastest = step_ns, (cuts, layout)
        return step_ns

    def layout(self, cuts: Cuts) -> Layout:
        """Returns the layout with some cuts; that of the fastest is kept, because choosing its layers takes long."""
        if self._fastest is not None and self._fastest[0] == cuts:
            return self._fastest[1]
        return self.problem.layout(cuts, self.placements)
