"""Orders of the layers that cuts may follow: the profile's, and those through the best cuts of the whole graph.

A search that cuts a line of layers sees no cut that parts a branch from what its line puts between. So the downsets of
the graph are searched for the cuts whose most loaded device has the least to do, for some numbers of stages; a line
through such cuts is searched as well wherever it beats the profile's by more than `WORTH`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import msgspec

from bapipe.errors import Infeasible
from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.formats.codec import fingerprint
from bapipe.formats.plan import Certificate, Plan, StagePlan, certify
from bapipe.formats.profile import LOSS, Measurement, ModelProfile
from bapipe.graph.downsets import downsets, prefixes
from bapipe.graph.layer_graph import contract, of_layers, topological_order
from bapipe.planner.throughput.homogeneous import HomogeneousDevices
from bapipe.planner.throughput.loads import Boundaries, StageCostSums
from bapipe.planner.throughput.min_devices_dp import min_max_load_homogeneous
from bapipe.planner.throughput.problem import StagePath

MAX_DOWNSETS = 1000
"""Up to how many downsets the best cuts of a graph are looked for."""

WORTH = 0.995
"""An order is searched where its largest load is less than this share of the profile's order's."""

Explore = Callable[[Mapping[str, ModelProfile]], Plan]


def plan_over_linearizations(
    profiles: Mapping[str, ModelProfile], cluster: Cluster, limits: Sequence[int], explore: Explore
) -> Plan:
    """Returns the fastest plan over the orders worth a search; `explore` plans for profiles in one order.

    Args:
        limits: what each device may hold.

    Raises:
        Infeasible: nothing fits in any of the orders.
    """
    first = profiles[cluster.devices[0].kind]
    lines = [tuple(range(len(first.layers))), *promising_linearizations(profiles, cluster, limits)]
    plans: list[Plan] = []
    failure: Infeasible | None = None
    for line in lines:
        try:
            plans.append(explore({kind: with_layer_order(profile, line) for kind, profile in profiles.items()}))
        except Infeasible as error:
            failure = failure or error
    if not plans:
        assert failure is not None
        raise failure
    best = min(plans, key=lambda plan: plan.prediction.step_ns)
    return best if len(lines) == 1 else _with_names_of(best, profiles, _joint(plans, best, len(lines)))


def promising_linearizations(
    profiles: Mapping[str, ModelProfile], cluster: Cluster, limits: Sequence[int]
) -> list[tuple[int, ...]]:
    """Returns orders of the layers, by their numbers, whose cuts are better than those of the profile's own order.

    Compared are the largest loads with the largest micro-batches, one device a stage, every device like the first, and
    the slowest link.
    """
    first = profiles[cluster.devices[0].kind]
    graph = of_layers(first)
    if graph.has_single_order:
        return []
    place = {layer.name: i for i, layer in enumerate(first.layers)}
    together = [(i, *(place[name] for name in layer.shares)) for i, layer in enumerate(first.layers) if layer.shares]
    small, parts = contract(graph, together)
    found = downsets(small, MAX_DOWNSETS)
    if found is None or len(found) == small.num_nodes + 1:
        return []
    line = Boundaries(prefixes(topological_order(small)), parts, graph.num_nodes)
    everywhere = Boundaries(found, parts, graph.num_nodes)
    orders, size = [], first.microbatch_sizes[-1]
    for num_stages in sorted({2, (len(limits) + 1) // 2, len(limits)} - {0, 1}):
        along = _best(_alike(line, first, cluster, limits, size, num_stages))
        best = _best(_alike(everywhere, first, cluster, limits, size, num_stages))
        if best is not None and (along is None or best.load < WORTH * along.load):
            stages = [everywhere.layers(begin, end) for begin, end in pairwise(best.boundaries)]
            order = [layer for stage in stages for layer in stage]
            if first.layers[-1].name == LOSS:
                order.remove(len(order) - 1)
                order.append(len(order))
            orders.append(tuple(order))
    return list(dict.fromkeys(orders))


def with_layer_order(profile: ModelProfile, order: Sequence[int]) -> ModelProfile:
    """Returns the profile with its layers in another topological order."""
    return msgspec.structs.replace(
        profile,
        layers=tuple(profile.layers[i] for i in order),
        measurements=tuple(
            Measurement(microbatch_size=m.microbatch_size, layers=tuple(m.layers[i] for i in order))
            for m in profile.measurements
        ),
    )


def _alike(
    cuts: Boundaries, profile: ModelProfile, cluster: Cluster, limits: Sequence[int], size: int, num_stages: int
) -> HomogeneousDevices:
    device = cluster.devices[0]
    links = [cluster.link(a, b) for a in range(len(limits)) for b in range(len(limits)) if a != b]
    return HomogeneousDevices(
        cuts,
        StageCostSums(cuts, profile, size, device.speed),
        num_devices=num_stages,
        num_microbatches=num_stages,
        max_replicas=1,
        link=Bandwidth(
            bytes_per_s=min(link.bytes_per_s for link in links), latency_ns=max(link.latency_ns for link in links)
        ),
        overlaps=all(device.overlaps_transfers for device in cluster.devices),
        memory_bytes=max(limits),
    )


def _best(problem: HomogeneousDevices) -> StagePath | None:
    return min_max_load_homogeneous(problem, bound=problem.bound_ns, ceiling=problem.ceiling_ns).best


def _joint(plans: Sequence[Plan], best: Plan, num_orders: int) -> Certificate:
    bound_ns = min(plan.certificate.lower_bound_ns for plan in plans)
    space = f"{num_orders} orders of the layers, the profile's and those of the best cuts of their graph; along each: "
    return certify(best.prediction.step_ns, min(bound_ns, best.prediction.step_ns), space + best.certificate.space)


def _with_names_of(plan: Plan, profiles: Mapping[str, ModelProfile], certificate: Certificate) -> Plan:
    """The plan with each stage's layers in the profile's order, and made of the profiles as they are."""
    place = {layer.name: i for i, layer in enumerate(next(iter(profiles.values())).layers)}
    return msgspec.structs.replace(
        plan,
        profiles={kind: fingerprint(profile) for kind, profile in sorted(profiles.items())},
        stages=tuple(
            StagePlan(
                layers=tuple(sorted(stage.layers, key=place.__getitem__)),
                devices=stage.devices,
                recompute=stage.recompute,
            )
            for stage in plan.stages
        ),
        certificate=certificate,
    )
