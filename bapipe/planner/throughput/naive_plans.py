"""The naive plans for throughput: all layers as one stage, on one device or on replicas, at each micro-batch size.

Every search begins with them, so no result has a larger load than one of them that fits. Of n replicas on the first n
devices, the one at position p runs ceil((M - p) / n) of M micro-batches; of devices that are alike, the first runs the
most. So the loads for all n need one computation for each kind, speed and limit of devices, and each slowest link.

A load counts the whole all-reduce, which in a step of replicas overlaps the backward. Steps of one stage follow each
other without a pipeline to fill, so such a plan counts with its simulated step if that is shorter than its load.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.formats.plan import Alternative
from bapipe.planner.deadline import Deadline
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution
from bapipe.planner.throughput.load_solution import simulate_solution
from bapipe.planner.throughput.loads import StageCostSums

if TYPE_CHECKING:
    from bapipe.planner.throughput.problem import IntArray

ONE_DEVICE, DATA_PARALLEL = "one-device", "data-parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class NaivePlan:
    """All layers as one stage on some devices; `fits` says whether all of them have enough memory.

    `load_ns` is the largest load or, if that is shorter, the step.
    """

    name: str
    microbatch_size: int
    ranks: tuple[int, ...]
    load_ns: int
    fits: bool

    @property
    def sort_key(self) -> tuple[bool, int, int]:
        """Sort key: plans that fit come first, then small loads; of equal loads the larger micro-batch wins."""
        return not self.fits, self.load_ns, -self.microbatch_size

    def solution(self, num_layers: int) -> LoadSolution:
        """Returns the plan as the result of a search that has proven nothing."""
        return LoadSolution(
            microbatch_size=self.microbatch_size,
            load_ns=self.load_ns,
            bound_ns=0,
            stages=((tuple(range(num_layers)), self.ranks),),
        )


def best_naive_plans(whole: LoadSearch, microbatch_sizes: Sequence[int], deadline: Deadline) -> list[NaivePlan]:
    """Returns the best plan on one device, and the best on several, over some micro-batch sizes.

    Args:
        whole: the search with two boundaries, the ends of the graph.
        deadline: when it has passed, no more sizes are looked at after the first.
    """
    links = slowest_links_of_first(whole.cluster)
    best: dict[str, NaivePlan] = {}
    for size in microbatch_sizes:
        if best and deadline.is_over:
            break
        for plan in _plans_of_size(whole, size, links):
            timed = _no_longer_than_step(whole, plan) if plan.fits else plan
            if plan.name not in best or timed.sort_key < best[plan.name].sort_key:
                best[plan.name] = timed
    return list(best.values())


def naive_alternatives(whole: LoadSearch, naive: Sequence[NaivePlan], load_ns: int) -> list[Alternative]:
    """Returns naive plans, simulated and compared with the load of the best plan."""
    alternatives = []
    for plan in naive:
        _, prediction = simulate_solution(whole, plan.solution(whole.boundaries.num_layers))
        lack_bytes = max(prediction.ranks[rank].peak_bytes - whole.limits[rank] for rank in plan.ranks)
        alternatives.append(
            Alternative(
                name=plan.name,
                step_ns=prediction.step_ns,
                peak_bytes=prediction.peak_bytes,
                feasible=lack_bytes <= 0,
                why_not=_why_not(lack_bytes, plan.load_ns / load_ns - 1 if load_ns else 0.0),
            )
        )
    return sorted(alternatives, key=lambda a: (not a.feasible, a.step_ns))


def _why_not(lack_bytes: int, extra_load: float) -> str:
    if lack_bytes > 0:
        return f"a device lacks {lack_bytes:,} bytes"
    return f"its largest load is {extra_load:.1%} larger" if extra_load else "as small a load as this plan's"


def _no_longer_than_step(whole: LoadSearch, plan: NaivePlan) -> NaivePlan:
    _, prediction = simulate_solution(whole, plan.solution(whole.boundaries.num_layers))
    return replace(plan, load_ns=min(plan.load_ns, prediction.step_ns))


def slowest_links_of_first(cluster: Cluster) -> list[Bandwidth]:
    """Returns for n = 1, 2, ... the least bandwidth and the largest latency of the links among the first n devices."""
    found = [cluster.intra_host]  # one device has no link, and its all-reduce takes no time
    # The hosts of the devices so far: a link within one, or between two of them, is met when a device joins.
    hosts = {cluster.devices[0].host}
    for rank in range(1, len(cluster.devices)):
        links = found[-1:] if rank > 1 else []
        # Links of their own can differ from pair to pair, and in the two directions.
        if cluster.links:
            links += [link for other in range(rank) for link in (cluster.link(rank, other), cluster.link(other, rank))]
        else:
            own = cluster.devices[rank].host
            links += [cluster.intra_host] * (own in hosts) + [cluster.inter_host] * bool(hosts - {own})
            hosts.add(own)
        found.append(_slowest(links))
    return found


def _slowest(known: Sequence[Bandwidth]) -> Bandwidth:
    return Bandwidth(
        bytes_per_s=min(link.bytes_per_s for link in known), latency_ns=max(link.latency_ns for link in known)
    )


def _plans_of_size(whole: LoadSearch, size: int, links: Sequence[Bandwidth]) -> list[NaivePlan]:
    """Returns the best plan on one device, and of those on several the best and that on the most, at one size."""
    num_devices, num_microbatches = len(whole.cluster.devices), whole.minibatch_size // size
    most = min(num_devices, num_microbatches)
    # A device beyond the number of micro-batches would have nothing to do.
    counts = np.arange(1, most + 1)
    loads: IntArray = np.zeros(most, dtype=np.int64)  # [counts]
    fits = np.ones(most, dtype=bool)
    singles = []
    for first, sums in _first_of_alike(whole, size):
        has_room = _fits(sums, whole.limits[first])
        single_ns = int(_loads(sums, num_microbatches, np.array([1]), links[:1], 0)[0])
        singles.append(
            NaivePlan(name=ONE_DEVICE, microbatch_size=size, ranks=(first,), load_ns=single_ns, fits=has_room)
        )
        # It takes part from n = first + 1 on.
        with_it = counts[first:]
        loads[first:] = np.maximum(loads[first:], _loads(sums, num_microbatches, with_it, links[first:most], first))
        fits[first:] &= has_room
        if sums.num_without_replicas(0, -1):
            fits[1:] = False
            most = 1  # a layer that several devices cannot run
    best = [min(singles, key=lambda plan: plan.sort_key)]
    if most > 1:
        # The most devices have the longest ring, but in a step it may overlap the backward.
        least = min(range(1, most), key=lambda i: (not fits[i], loads[i]))
        best += [
            NaivePlan(
                name=DATA_PARALLEL,
                microbatch_size=size,
                ranks=tuple(range(i + 1)),
                load_ns=int(loads[i]),
                fits=bool(fits[i]),
            )
            for i in sorted({least, most - 1})
        ]
    return best


def _first_of_alike(whole: LoadSearch, size: int) -> list[tuple[int, StageCostSums]]:
    """Returns the first device of each kind, speed, limit and links among members, and what the layers cost on it."""
    cluster, first = whole.cluster, dict[tuple[str, float, int, tuple[Bandwidth, ...]], int]()
    for rank, device in enumerate(cluster.devices):
        first.setdefault((device.kind, device.speed, whole.limits[rank], tuple(cluster.member_links(rank))), rank)
    nothing = np.zeros(2, dtype=np.int64)  # crosses the ends of the graph
    return [
        (
            rank,
            StageCostSums(whole.boundaries, whole.profiles[kind], size, speed, member_links, (nothing, nothing)),
        )
        for (kind, speed, _, member_links), rank in first.items()
    ]


def _loads(
    sums: StageCostSums, num_microbatches: int, counts: "IntArray", links: Sequence[Bandwidth], position: int
) -> "IntArray":
    """Returns the loads of the device at a position for some numbers of replicas, with the slowest link of each."""
    times = -(-(num_microbatches - position) // counts)
    loads: IntArray = times * sums.microbatch_ns(0, -1)
    # The all-reduce is a ring over the slowest link, which few numbers of replicas change.
    of_link = np.array([number for number, _ in _numbered(links)])
    for number, link in dict(_numbered(links)).items():
        some = of_link == number
        loads[some] += sums.per_step_ns(0, -1, counts[some], link)
    return loads


def _numbered(links: Sequence[Bandwidth]) -> list[tuple[int, Bandwidth]]:
    """Returns each link with a number that equal ones share."""
    numbers = {link: number for number, link in enumerate(dict.fromkeys(links))}
    return [(numbers[link], link) for link in links]


def _fits(sums: StageCostSums, limit_bytes: int) -> bool:
    """Returns whether all layers fit in memory, with the one micro-batch in flight that a single stage has."""
    return bool(sums.fits(np.array([0]), np.array([1]), 1, 1, limit_bytes)[0])
