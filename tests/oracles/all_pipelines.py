"""The minimal step time over every pipeline of a chain, for all cuts and devices at once; independent of the searches.

A step is run on whole arrays, one entry per pipeline: every action and every transfer is a maximum and a sum of them.
If devices cannot overlap transfers, that is only a lower bound of the step time; the pipelines are then simulated one
by one in the order of it, until it reaches the best one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, combinations, pairwise, permutations
from math import floor
from typing import Any

import numpy as np
from msgspec import UNSET

from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan
from bapipe.schedules import SCHEDULES
from bapipe.schedules.table import Action, Phase, Schedule
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import BUCKET_BYTES, build_stages, fill_buckets, stage_cost_by_speed
from bapipe.simulator.tied_weights import TiedWeightCost

Array = Any


@dataclass(frozen=True, kw_only=True)
class Question:
    """A chain without shared parameters, on devices of one kind; what each may hold; what stages may do."""

    profile: ModelProfile
    cluster: Cluster
    limits: Sequence[int]
    minibatch_size: int
    replicas: bool = True
    recompute: bool = True


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The fastest pipeline, how many there are, and how many of them fit."""

    step_ns: int
    stages: tuple[StagePlan, ...]
    table: Schedule
    num_pipelines: int
    num_fitting: int


def least_step(question: Question, sizes: Sequence[int], schedules: Sequence[str]) -> Answer | None:
    """Returns the fastest of all pipelines, None if none fits."""
    overlaps = all(device.overlaps_transfers for device in question.cluster.devices)
    found: list[tuple[int, Any]] = []
    num_pipelines = num_fitting = 0
    for size in sizes:
        costs = _Costs(question, size)
        for name in schedules:
            for group in _groups(len(question.cluster.devices), question, size):
                pipelines = _Pipelines(question, costs, name, size, group)
                num_pipelines += pipelines.num_all
                num_fitting += len(pipelines.step_ns)
                if overlaps and len(pipelines.step_ns):
                    best = int(pipelines.step_ns.argmin())
                    found.append((int(pipelines.step_ns[best]), (pipelines, best)))
                elif not overlaps:
                    found += [(int(ns), (pipelines, i)) for i, ns in enumerate(pipelines.step_ns)]
    best_one: Answer | None = None
    for bound_ns, (pipelines, i) in sorted(found, key=lambda pair: pair[0]):
        if best_one is not None and bound_ns >= best_one.step_ns:
            break
        stages, table, step_ns = pipelines.simulated(i)
        assert step_ns == bound_ns if overlaps else step_ns >= bound_ns
        if best_one is None or step_ns < best_one.step_ns:
            best_one = Answer(
                step_ns=step_ns, stages=stages, table=table, num_pipelines=num_pipelines, num_fitting=num_fitting
            )
    return best_one


def _groups(num_devices: int, question: Question, size: int) -> Iterator[tuple[int, ...]]:
    """How many devices each stage may have: (1, 2) is one for the first and two for the second."""
    num_layers, num = len(question.profile.layers), question.minibatch_size // size
    for used in range(1, num_devices + 1):
        for num_cuts in range(min(used, num_layers)):
            for inner in combinations(range(1, used), num_cuts):
                group = tuple(b - a for a, b in pairwise((0, *inner, used)))
                if max(group) <= (num if question.replicas else 1):
                    yield group


class _Costs:
    """Figures of layers a to b on device d, as arrays [d, a, b]; of the tensors at a cut, as arrays [cut]."""

    def __init__(self, question: Question, size: int) -> None:
        profile, devices = question.profile, question.cluster.devices
        rows = self.rows = list(zip(profile.layers, profile.at(size), strict=True))
        self.forward_ns, self._recompute = [measured.forward_ns for _, measured in rows], question.recompute
        self._least: dict[Any, int] = {}
        self._subsets: dict[tuple[int, int], tuple[Array, Array, Array]] = {}
        count = len(rows)
        shape = len(devices), count + 1, count + 1
        names = "forward", "backward", "input_grad", "weight_grad", "update", "held", "stash", "left", "work"
        self.of: dict[str, Array] = {
            name: np.zeros(shape, dtype=np.int64) for name in (*names, "done_b", "done_w", "reduced")
        }
        self.send, self.grad = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
        sends_back = np.zeros(count + 1, dtype=bool)  # a stage that begins at the cut
        for i, (layer, measured) in enumerate(rows):
            for tensor, num_bytes in zip(layer.outputs, measured.output_bytes, strict=True):
                last = max((j for j, (user, _) in enumerate(rows) if tensor in user.inputs), default=i)
                self.send[i + 1 : last + 1] += num_bytes
                if tensor not in layer.no_gradient:
                    self.grad[i + 1 : last + 1] += num_bytes
                    sends_back[i + 1 : last + 1] = True
        for d, device in enumerate(devices):
            for a, b in combinations(range(count + 1), 2):
                layers = rows[a:b][::-1]
                buckets = fill_buckets([layer.param_bytes for layer, _ in layers])
                assert sum(layer.param_bytes for layer, _ in layers) < BUCKET_BYTES
                ends = [end for end, _ in buckets]
                cost = stage_cost_by_speed(
                    layers, frozenset(), ends, TiedWeightCost(), sends_gradient=bool(sends_back[a])
                )(device.speed)
                done = cost.gradient_done_ns[0] if buckets else (0, 0)
                values = (
                    *(cost.forward_ns, cost.backward_ns, cost.input_grad_ns, cost.weight_grad_ns, cost.update_ns),
                    *(2 * cost.param_bytes + cost.optimizer_bytes, cost.stash_bytes, cost.gradient_stash_bytes),
                    *(cost.workspace_bytes, *done, sum(num_bytes for _, num_bytes in buckets)),
                )
                for array, value in zip(self.of.values(), values, strict=True):
                    array[d, a, b] = value

    def least_again(
        self, a: int, b: int, states: Sequence[tuple[tuple[int, int, int], ...]], rooms: tuple[int, ...]
    ) -> int:
        """Of all sets of layers a to b that fit recomputed, as bits, the one of the least F; -1 if none fits.

        Args:
            states: what is in flight on each replica, at each of its actions.
            rooms: bytes for the stashes, and for what I leaves, on each replica.
        """
        key = a, b, tuple(states), rooms
        if key not in self._least:
            if (a, b) not in self._subsets:
                self._subsets[a, b] = self._all_subsets(a, b)
            forward_ns, kept, besides = self._subsets[a, b]
            left = int(self.of["left"][0, a, b])
            held = [
                np.maximum.reduce([n * kept + backward * besides + w * left for n, backward, w in of_replica])
                for of_replica in states
            ]
            fits = np.logical_and.reduce([of <= room for of, room in zip(held, rooms, strict=True)])
            fits &= (np.arange(len(fits)) == 0) | self._recompute
            self._least[key] = int(np.where(fits, forward_ns, 2**60).argmin()) if fits.any() else -1
            if fits[0]:
                self._least[key] = 0
        return self._least[key]

    def _all_subsets(self, a: int, b: int) -> tuple[Array, Array, Array]:
        """For every set of layers: their F, what is kept from F on, and what besides in the backward."""
        sets = (np.arange(2 ** (b - a))[:, None] >> np.arange(b - a)) & 1 == 1  # [sets, layers]
        stash = np.array([measured.stash_bytes for _, measured in self.rows[a:b]])
        kept = (~sets) @ stash
        for i, (layer, measured) in enumerate(self.rows):
            for tensor, num_bytes in zip(layer.outputs, measured.output_bytes, strict=True):
                users = [j - a for j in range(a, b) if tensor in self.rows[j][0].inputs]
                if not users:
                    continue
                makes = sets[:, i - a] if a <= i < b else np.zeros(len(sets), dtype=bool)
                kept = kept + num_bytes * (sets[:, users] != makes[:, None]).any(axis=1)
        kept[-1] = self.send[a] if a else 0  # a whole stage keeps its input
        return sets @ np.array(self.forward_ns[a:b]), kept, sets @ stash


class _Pipelines:
    """All pipelines whose stages have so many devices each, of which those that fit are kept; `step_ns` of each."""

    def __init__(self, question: Question, costs: _Costs, schedule: str, size: int, group: tuple[int, ...]) -> None:
        self.question, self.costs, self.group, self.size = question, costs, group, size
        self.num = question.minibatch_size // size
        self.first = list(accumulate(group, initial=0))
        self.order = [SCHEDULES[schedule](sum(group), self.num).order[first] for first in self.first[:-1]]
        ranks = range(len(question.cluster.devices))
        orders = list(permutations(ranks, sum(group)))
        last = len(question.profile.layers)
        cuts = [(0, *inner, last) for inner in combinations(range(1, last), len(group) - 1)]
        self.devices = np.repeat(np.array(orders, dtype=np.int64).reshape(len(orders), -1), len(cuts), axis=0)
        self.cuts = np.tile(np.array(cuts, dtype=np.int64).reshape(len(cuts), -1), (len(orders), 1))
        self.num_all = len(self.cuts)
        self.again = np.zeros((len(self.cuts), len(group)), dtype=np.int64)  # bit j: layer j of the stage recomputes
        self._keep_what_fits()
        self.step_ns: Array = self._run() if len(self.cuts) else np.zeros(0, dtype=np.int64)

    def simulated(self, i: int) -> tuple[tuple[StagePlan, ...], Schedule, int]:
        """One of them as a plan's stages and its table, and its simulated step time."""
        names = [layer.name for layer in self.question.profile.layers]
        cluster = self.question.cluster
        devices = tuple(tuple(int(d) for d in self.devices[i, a:b]) for a, b in pairwise(self.first))
        stages = tuple(
            StagePlan(
                layers=tuple(names[a:b]),
                devices=tuple(cluster.devices[d].name for d in own),
                recompute=bool(again),
                recompute_layers=tuple(names[a + j] for j in range(b - a) if again >> j & 1)
                if 0 < again < 2 ** (b - a) - 1
                else UNSET,
            )
            for own, (a, b), again in zip(
                devices, pairwise(map(int, self.cuts[i])), map(int, self.again[i]), strict=True
            )
        )
        order: list[list[Action]] = [[] for _ in cluster.devices]
        for s, own in enumerate(devices):
            for _, phase, m in self.order[s]:
                order[own[m % len(own)]].append(Action(s, phase, m))
        table = Schedule(devices=devices, num_microbatches=self.num, order=tuple(map(tuple, order)))
        timeline = simulate_schedule(table, build_stages(stages, self._profiles(), cluster, self.size), cluster)
        assert all(held.total <= limit for held, limit in zip(timeline.memory, self.question.limits, strict=True))
        return stages, table, timeline.step_ns

    def _profiles(self) -> dict[str, ModelProfile]:
        return {self.question.profile.device.kind: self.question.profile}

    def _figure(self, name: str, s: int, k: int) -> Array:
        return self.costs.of[name][self.devices[:, self.first[s] + k], self.cuts[:, s], self.cuts[:, s + 1]]

    def _keep_what_fits(self) -> None:
        limits = np.array(self.question.limits)
        fits = np.ones(len(self.cuts), dtype=bool)
        for s, replicas in enumerate(self.group):
            states = [self._states(s, k) for k in range(replicas)]
            rooms = np.stack([limits[self.devices[:, self.first[s] + k]] - self._fixed(s, k) for k in range(replicas)])
            # Many pipelines have the same stage on devices with as much room: each question is asked once.
            asked, number = np.unique(
                np.stack([self.cuts[:, s], self.cuts[:, s + 1], *rooms]), axis=1, return_inverse=True
            )
            answers = [self.costs.least_again(a, b, states, tuple(of)) for a, b, *of in asked.T.tolist()]
            self.again[:, s] = np.array(answers, dtype=np.int64)[number.ravel()]
            fits &= self.again[:, s] >= 0
        self.devices, self.cuts, self.again = self.devices[fits], self.cuts[fits], self.again[fits]

    def _states(self, s: int, k: int) -> tuple[tuple[int, int, int], ...]:
        """How many micro-batches are between F and the end of their backward, in it, and between I and W."""
        now, seen = [0, 0, 0], set()
        for phase in (phase for _, phase, m in self.order[s] if m % self.group[s] == k):
            now[0] += phase is Phase.FORWARD
            now[1] += phase in (Phase.BACKWARD, Phase.INPUT_GRAD)
            now[2] += phase is Phase.INPUT_GRAD
            seen.add((now[0], now[1], now[2]))
            if phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD):
                now = [now[0] - 1, now[1] - 1, now[2] - (phase is Phase.WEIGHT_GRAD)]
        return tuple(sorted(seen))

    def _fixed(self, s: int, k: int) -> Array:
        """Parameters, gradients, optimizer state, buffers and workspace."""
        num = sum(phase is Phase.FORWARD for _, phase, m in self.order[s] if m % self.group[s] == k)
        enters = self.costs.send[self.cuts[:, s]] if s else np.zeros(len(self.cuts), dtype=np.int64)
        returns = self.costs.grad[self.cuts[:, s + 1]] if s + 1 < len(self.group) else 0
        return self._figure("held", s, k) + num * (enters + returns) + self._figure("work", s, k)

    def _again_ns(self, s: int, k: int) -> Array:
        """F of the recomputed layers, divided by the speed and rounded half up."""
        chosen = np.stack([self.cuts[:, s], self.again[:, s], self.devices[:, self.first[s] + k]])
        asked, number = np.unique(chosen, axis=1, return_inverse=True)
        found = []
        for begin, again, device in asked.T.tolist():
            speed = Fraction(str(self.question.cluster.devices[device].speed))
            total_ns = sum(ns for j, ns in enumerate(self.costs.forward_ns[begin:]) if again >> j & 1)
            found.append(floor(total_ns / speed + Fraction(1, 2)))
        return np.array(found, dtype=np.int64)[number.ravel()]

    def _run(self) -> Array:
        """The end of the step: every action as early as its device's order and its inputs allow."""
        num_stages = len(self.group)
        orders = {
            (s, k): [(phase, m) for _, phase, m in self.order[s] if m % self.group[s] == k]
            for s in range(num_stages)
            for k in range(self.group[s])
        }
        self.again_ns = {(s, k): self._again_ns(s, k) for s, k in orders}
        zero = np.zeros(len(self.cuts), dtype=np.int64)
        done = dict.fromkeys(orders, zero)
        last_start = dict.fromkeys(orders, zero)
        at: dict[tuple[str, int, int], Array] = {("in", 0, m): zero for m in range(self.num)}
        wires: dict[tuple[int, int, int, int], Array] = {}
        places = dict.fromkeys(orders, 0)
        while any(places[own] < len(orders[own]) for own in orders):
            before = dict(places)
            for (s, k), order in orders.items():
                while places[s, k] < len(order):
                    phase, m = order[places[s, k]]
                    key = {"F": "in", "W": "left"}.get(phase.value, "back"), s, m
                    if key not in at:
                        break
                    start = np.maximum(done[s, k], at[key])
                    done[s, k] = end = start + self._ns(phase, s, k)
                    last_start[s, k] = start
                    places[s, k] += 1
                    if phase is Phase.FORWARD and s + 1 < num_stages:
                        at["in", s + 1, m] = self._sent(wires, s, s + 1, m, end)
                    elif phase is Phase.FORWARD:
                        at["back", s, m] = end
                    elif phase is not Phase.WEIGHT_GRAD:
                        at["left", s, m] = end
                        if s:
                            at["back", s - 1, m] = self._sent(wires, s, s - 1, m, end)
            assert places != before, "deadlock"
        ends = [self._updated(s, k, done, last_start, orders[s, k][-1][0]) for s, k in orders]
        return np.maximum.reduce(ends)

    def _ns(self, phase: Phase, s: int, k: int) -> Array:
        name = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}[phase.value]
        own = self._figure(name, s, k)
        return own + (self.again_ns[s, k] if phase.value in "BI" else 0)

    def _sent(self, wires: dict[tuple[int, int, int, int], Array], s: int, to: int, m: int, end: Array) -> Array:
        """When what a stage has made at `end` reaches the next or the last one."""
        k, other = m % self.group[s], m % self.group[to]
        sizes = self.costs.send[self.cuts[:, to]] if to > s else self.costs.grad[self.cuts[:, s]]
        pair = self.devices[:, self.first[s] + k], self.devices[:, self.first[to] + other]
        start = np.maximum(end, wires.get((s, k, to, other), 0))
        wires[s, k, to, other] = arrives = start + _transfer_ns(self._links(), pair, sizes)
        return arrives

    def _links(self) -> Array:
        count = range(len(self.question.cluster.devices))
        own = self.question.cluster.link
        nothing = Bandwidth(bytes_per_s=1, latency_ns=0)
        links = [[own(a, b) if a != b else nothing for b in count] for a in count]
        return np.array([[(link.bytes_per_s, link.latency_ns) for link in row] for row in links], dtype=np.int64)

    def _updated(self, s: int, k: int, done: Any, last_start: Any, last: Phase) -> Array:
        ready = done[s, k]
        if self.group[s] > 1:
            ready = np.maximum(ready, self._synced(s, last_start, last))
        return ready + self._figure("update", s, k)

    def _synced(self, s: int, last_start: Any, last: Phase) -> Array:
        """When the stage's one all-reduce is done; 0 where there is nothing to sum."""
        replicas = self.group[s]
        gradients = []
        for k in range(replicas):
            name = "done_w" if last is Phase.WEIGHT_GRAD else "done_b"
            again = self.again_ns[s, k] * (name == "done_b")
            gradients.append(last_start[s, k] + self._figure(name, s, k) + again)
        num_bytes = self._figure("reduced", s, 0)
        own = [self.devices[:, self.first[s] + k] for k in range(replicas)]
        share = -(-num_bytes // replicas)
        hops = [_transfer_ns(self._links(), (a, b), share) for a, b in permutations(own, 2)]
        ring = 2 * (replicas - 1) * np.maximum.reduce(hops)
        return np.where(num_bytes > 0, np.maximum.reduce(gradients) + ring, 0)


def _transfer_ns(links: Array, pair: tuple[Array, Array], num_bytes: Array) -> Array:
    rate, latency = links[*pair, 0], links[*pair, 1]
    return np.where(num_bytes > 0, latency - (-num_bytes * 1_000_000_000 // rate), 0)
