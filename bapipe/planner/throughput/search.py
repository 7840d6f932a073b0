"""Plans for throughput: the least load of any device once the pipeline is full, whatever its first step takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil

import msgspec

from bapipe.errors import Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import fingerprint
from bapipe.formats.plan import THROUGHPUT, Alternative, Plan, StagePlan, certify
from bapipe.formats.profile import ModelProfile
from bapipe.graph.layer_graph import (
    Graph,
    contract,
    depth_first_order,
    downsets,
    of_layers,
    prefixes,
    topological_order,
)
from bapipe.planner.options import PlanOptions
from bapipe.planner.throughput.heterogeneous import MAX_COUNTS, MAX_GAPS, UnlikeDevices
from bapipe.planner.throughput.homogeneous import least_load_alike
from bapipe.planner.throughput.loads import AlikeDevices, Cuts, Runs
from bapipe.planner.throughput.min_max_dp import least_load
from bapipe.planner.throughput.neighbourhood import near
from bapipe.planner.throughput.problem import LeastLoad
from bapipe.planner.validation import check_inputs, microbatch_sizes
from bapipe.schedules.one_f_one_b import one_rank
from bapipe.schedules.table import Action, Schedule
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import build_stages

MAX_DOWNSETS = 3000
"""Up to how many downsets all of them are looked at."""

MAX_NEAR = 800
"""How many downsets are looked at around the best cuts, where not all of them are."""

WORTH = 0.9998
"""Cuts near the best are looked for again where they made its load less than this share of what it was."""

Tell = Callable[[float, float], None]
"""(best load so far, or the limit that none was found below; bound), in nanoseconds."""


Stage = tuple[tuple[int, ...], tuple[int, ...]]
"""Layers, and ranks of the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The stages of least load at one micro-batch size, none where nothing fits; no plan's load is below the bound."""

    microbatch_size: int
    load_ns: int
    bound_ns: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is searched: `whole` says whether the cuts are all there are."""

    profiles: Mapping[str, ModelProfile]
    cluster: Cluster
    cuts: Cuts
    whole: bool
    minibatch_size: int

    def answer(self, microbatch_size: int, limits: Sequence[int], tell: Tell | None) -> Answer:
        """Returns the best stages with micro-batches of a size, where devices may hold so much."""
        if _alike(self.cluster, limits):
            alike = self.alike(microbatch_size, limits[0])
            bound_ns, ceiling_ns = alike.bound_ns, alike.ceiling_ns
            found = least_load_alike(alike, bound=bound_ns, ceiling=ceiling_ns, tell=tell)
            groups = _in_turn(found)
        else:
            unlike = self.unlike(microbatch_size, limits)
            bound_ns, ceiling_ns = unlike.bound_ns, unlike.ceiling_ns
            found = least_load(unlike, bound=bound_ns, ceiling=ceiling_ns, dtype=int, tell=tell)
            groups = [unlike.states[state][1] for state in found.best.states] if found.best else []
        if found.best is None:
            return Answer(microbatch_size=microbatch_size, load_ns=0, bound_ns=ceil(bound_ns), stages=())
        ends = pairwise(found.best.boundaries)
        return Answer(
            microbatch_size=microbatch_size,
            load_ns=int(found.best.load),
            bound_ns=ceil(found.bound) if self.whole else ceil(bound_ns),
            stages=tuple(
                (tuple(self.cuts.layers(begin, end)), tuple(range(start, start + count)))
                for (begin, end), (start, count) in zip(ends, groups, strict=True)
            ),
        )

    def alike(self, microbatch_size: int, limit_bytes: int) -> AlikeDevices:
        device = self.cluster.devices[0]
        return AlikeDevices(
            self.cuts,
            Runs(self.cuts, self.profiles[device.kind], microbatch_size, device.speed),
            num_devices=len(self.cluster.devices),
            num_microbatches=self.minibatch_size // microbatch_size,
            link=self.cluster.link(0, len(self.cluster.devices) - 1),
            overlaps=device.overlaps_transfers,
            memory_bytes=limit_bytes,
        )

    def unlike(self, microbatch_size: int, limits: Sequence[int]) -> UnlikeDevices:
        keys = sorted({(device.kind, device.speed) for device in self.cluster.devices})
        return UnlikeDevices(
            self.cuts,
            {(kind, speed): Runs(self.cuts, self.profiles[kind], microbatch_size, speed) for kind, speed in keys},
            self.cluster,
            num_microbatches=self.minibatch_size // microbatch_size,
            memory_bytes=limits,
        )


def plan_throughput(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    *,
    minibatch_size: int,
    microbatch_size: int | None = None,
    memory_limit_bytes: int | None = None,
    tell: Tell | None = None,
) -> Plan:
    """Returns the plan of `explore_throughput` over all micro-batch sizes that divide the mini-batch, or for one.

    Raises:
        BapipeError: a device kind without a profile, profiles of different models, or sizes that do not divide.
    """
    options = PlanOptions(minibatch_size=minibatch_size, microbatch_size=microbatch_size)
    check_inputs(profiles, cluster, options)
    return explore_throughput(
        profiles,
        cluster,
        minibatch_size=minibatch_size,
        microbatch_sizes=microbatch_sizes(profiles, cluster, options),
        limits=[min(d.memory_bytes, memory_limit_bytes or d.memory_bytes) for d in cluster.devices],
        tell=tell,
    )


def explore_throughput(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    *,
    minibatch_size: int,
    microbatch_sizes: Sequence[int],
    limits: Sequence[int],
    tell: Tell | None = None,
) -> Plan:
    """Returns the plan whose most loaded device has the least to do in a step.

    The space: cuts of the graph of layers at any of its downsets, any number of devices for a stage, every micro-batch
    size given. Layers that share parameters stay together. Its order is 1F1B deep enough to keep every device busy.

    Args:
        profiles: one for each kind of device in the cluster, all of one model.
        limits: what each device may hold.

    Raises:
        Infeasible: nothing fits; the message says how much memory would do.
    """
    first = profiles[cluster.devices[0].kind]
    graph = of_layers(first)
    place = {layer.name: i for i, layer in enumerate(first.layers)}
    together = [(i, *(place[other] for other in layer.shares)) for i, layer in enumerate(first.layers) if layer.shares]
    small, parts = contract(graph, together)
    cuts, whole, where = _cuts(small, parts, num_layers=graph.num_nodes)
    search = Search(profiles=profiles, cluster=cluster, cuts=cuts, whole=whole, minibatch_size=minibatch_size)
    answers = [search.answer(size, limits, tell) for size in microbatch_sizes]
    fitting = [answer for answer in answers if answer.stages]
    if not fitting:
        raise Infeasible(_lack(search, microbatch_sizes, limits))
    best = min(fitting, key=lambda answer: (answer.load_ns, -answer.microbatch_size))
    if not whole:
        best = _improved(search, small, parts, best, limits, tell)
    bound_ns = min(best.load_ns, *(answer.bound_ns for answer in answers))
    alike = _alike(cluster, limits)
    devices = (
        f"any number of {len(cluster.devices)} devices for a stage"
        if alike or len(cluster.devices) <= MAX_COUNTS
        else f"1, 2, 4, 8 and so on of {len(cluster.devices)} devices for a stage"
    )
    skipped = "" if alike or len(cluster.devices) <= MAX_GAPS else ", without gaps"
    space = (
        f"the largest load of a device, for {where} of {graph.num_nodes} layers; {devices}, in the cluster's order"
        f"{skipped}; micro-batches of {', '.join(map(str, microbatch_sizes))}; no recomputation"
    )
    plan = _plan(profiles, cluster, best, minibatch_size)
    others = _others(search, plan, best, limits)
    return msgspec.structs.replace(plan, certificate=certify(best.load_ns, bound_ns, space), alternatives=tuple(others))


def _cuts(graph: Graph, parts: Sequence[Sequence[int]], num_layers: int) -> tuple[Cuts, bool, str]:
    """Returns all downsets and True, or where these are too many those of some orders, and which in words."""
    found = downsets(graph, MAX_DOWNSETS)
    if found is not None:
        return Cuts(found, parts, num_layers), True, f"all cuts, at {len(found)} downsets,"
    orders = [topological_order(graph), depth_first_order(graph), depth_first_order(graph, reverse=True)]
    some = sorted({nodes for order in orders for nodes in prefixes(order)}, key=lambda n: (n.bit_count(), n))
    words = f"cuts along 3 orders and near the best, of more than {MAX_DOWNSETS} downsets (the bound holds for all),"
    return Cuts(some, parts, num_layers), False, words


def _improved(
    search: Search,
    graph: Graph,
    parts: Sequence[Sequence[int]],
    answer: Answer,
    limits: Sequence[int],
    tell: Tell | None,
) -> Answer:
    """Returns the best answer with cuts near those of an answer, near those of that one, and so on."""
    node_of = {layer: node for node, layers in enumerate(parts) for layer in layers}
    while True:
        ends = accumulate((sum({1 << node_of[layer] for layer in layers}) for layers, _ in answer.stages), initial=0)
        cuts = Cuts(near(graph, list(ends), MAX_NEAR), parts, search.cuts.inside.shape[1])
        found = replace(search, cuts=cuts).answer(answer.microbatch_size, limits, tell)
        if found.load_ns >= WORTH * answer.load_ns or not found.stages:
            return answer
        answer = found


def _alike(cluster: Cluster, limits: Sequence[int]) -> bool:
    """Whether nothing but their names tells the devices apart."""
    kinds = {
        (device.kind, device.speed, device.overlaps_transfers, limit)
        for device, limit in zip(cluster.devices, limits, strict=True)
    }
    hosts = {device.host for device in cluster.devices}
    one_link = cluster.intra_host == cluster.inter_host or len(hosts) in (1, len(cluster.devices))
    return len(kinds) == 1 and one_link and not cluster.links


def _in_turn(found: LeastLoad) -> list[tuple[int, int]]:
    """The devices of stages that take as many as they need, one after another."""
    counts = found.best.states if found.best else ()
    return list(zip(accumulate(counts[:-1], initial=0), counts, strict=True)) if counts else []


def deep_one_f_one_b(devices: Sequence[Sequence[int]], num_microbatches: int, num_ranks: int) -> Schedule:
    """Returns 1F1B over stages of several devices, with as many micro-batches in flight as devices run them.

    Stage s begins with one F for each device of stage s and later, dealt to its own devices in turn.
    """
    order: list[tuple[Action, ...]] = [()] * num_ranks
    for s, ranks in enumerate(devices):
        whole = one_rank(s, sum(map(len, devices[s:])), num_microbatches)
        for place, rank in enumerate(ranks):
            order[rank] = tuple(action for action in whole if action.microbatch % len(ranks) == place)
    return Schedule(devices=tuple(map(tuple, devices)), num_microbatches=num_microbatches, order=tuple(order))


def _plan(profiles: Mapping[str, ModelProfile], cluster: Cluster, answer: Answer, minibatch_size: int) -> Plan:
    """The plan of an answer, its certificate and alternatives still empty."""
    first = profiles[cluster.devices[0].kind]
    stages = tuple(
        StagePlan(
            layers=tuple(first.layers[i].name for i in layers),
            devices=tuple(cluster.devices[rank].name for rank in ranks),
        )
        for layers, ranks in answer.stages
    )
    num_microbatches = minibatch_size // answer.microbatch_size
    table = deep_one_f_one_b([ranks for _, ranks in answer.stages], num_microbatches, len(cluster.devices))
    costs = build_stages(stages, profiles, cluster, answer.microbatch_size)
    prediction = simulate_schedule(table, costs, cluster).prediction(minibatch_size)
    return Plan(
        model=first.model,
        factory=first.factory,
        arguments=first.arguments,
        profiles={kind: fingerprint(profile) for kind, profile in sorted(profiles.items())},
        cluster=cluster,
        objective=THROUGHPUT,
        minibatch_size=minibatch_size,
        microbatch_size=answer.microbatch_size,
        num_microbatches=num_microbatches,
        schedule="1f1b",
        stages=stages,
        order=tuple(tuple(map(str, actions)) for actions in table.order),
        prediction=msgspec.structs.replace(prediction, load_ns=answer.load_ns),
        certificate=certify(answer.load_ns, answer.load_ns, ""),
        alternatives=(),
    )


def _others(search: Search, plan: Plan, best: Answer, limits: Sequence[int]) -> list[Alternative]:
    """One device, and data parallelism over all of them, at the plan's micro-batch size."""
    num_devices, num_layers = len(search.cluster.devices), len(search.cuts.layers(0, search.cuts.num_boundaries - 1))
    unlike = search.unlike(best.microbatch_size, limits)
    found = []
    for name, ranks in {"one-device": (0,), "data-parallel": tuple(range(num_devices))}.items():
        if len(ranks) > plan.num_microbatches or (name == "data-parallel" and num_devices == 1):
            continue
        load_ns = unlike.load_alone(ranks)
        answer = Answer(
            microbatch_size=best.microbatch_size,
            load_ns=load_ns,
            bound_ns=0,
            stages=((tuple(range(num_layers)), ranks),),
        )
        judged = _plan(search.profiles, search.cluster, answer, plan.minibatch_size).prediction
        lack = max(judged.ranks[rank].peak_bytes - limits[rank] for rank in ranks)
        more = load_ns / best.load_ns - 1 if best.load_ns else 0.0
        found.append(
            Alternative(
                name=name,
                step_ns=judged.step_ns,
                peak_bytes=max(rank.peak_bytes for rank in judged.ranks),
                feasible=lack <= 0,
                why_not=_why_not(lack, more),
            )
        )
    return sorted(found, key=lambda a: (not a.feasible, a.step_ns))


def _why_not(lack_bytes: int, more: float) -> str:
    if lack_bytes > 0:
        return f"a device lacks {lack_bytes:,} bytes"
    return f"its largest load is {more:.1%} larger" if more else "as small a load as this plan's"


def _lack(search: Search, microbatch_sizes: Sequence[int], limits: Sequence[int]) -> str:
    """Says with how much more memory on each device something would fit, found by halving."""
    size = microbatch_sizes[0]
    enough, short = max(limits), 0
    while not search.answer(size, [limit + enough for limit in limits], None).stages:
        short, enough = enough, 2 * enough
    while enough - short > max(1, enough // 1000):
        middle = (enough + short) // 2
        if search.answer(size, [limit + middle for limit in limits], None).stages:
            enough = middle
        else:
            short = middle
    return (
        f"no plan for throughput fits in memory; the closest, with micro-batches of {size}, lacks {enough:,} bytes on "
        f"each device, which may hold {', '.join(f'{limit:,}' for limit in sorted(set(limits)))}. Try more devices, "
        "smaller micro-batches, or a smaller mini-batch"
    )
