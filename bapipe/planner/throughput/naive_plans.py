"""All layers as one stage, on one device or on replicas, at each micro-batch size.

Every search begins with the best of these plans. Of n replicas, the fastest first, the one at position p runs
ceil((M - p) / n) of M micro-batches; of devices that are alike, the first runs the most. So the loads for all n need
one computation for each kind, speed and limit of devices, and each slowest link.

A load counts the whole all-reduce, which in a step of replicas overlaps the backward. Steps of one stage follow each
other without a pipeline to fill, so such a plan counts with its simulated step if that is shorter than its load. What
is proven of loads does not hold for steps, so the plans of one stage are searched by themselves: each has a time that
its step cannot beat, and those are simulated in which that is below the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np

from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.formats.plan import Alternative
from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.results.solution import sort_alternatives
from bapipe.planner.stages.device_orders import DeviceOrder
from bapipe.planner.throughput.heterogeneous import MAX_DEVICES_WITH_GAPS
from bapipe.planner.throughput.load_search import LoadSearch, LoadSolution
from bapipe.planner.throughput.load_solution import simulate_solution
from bapipe.planner.throughput.loads import StageCostSums, host_sum_links, slowest_of

ONE_DEVICE, DATA_PARALLEL = "one-device", "data-parallel"


MAX_TIMED = 100
"""So many plans on one device, and on several, are simulated at most. Of others the bound is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NaivePlan:
    """All layers as one stage on some devices.

    Attributes:
        load_ns: the largest load or, of a plan that was simulated, its step if that is shorter.
        least_ns: its step takes no less.
        fits: whether all of the devices have enough memory.
    """

    microbatch_size: int
    ranks: tuple[int, ...]
    load_ns: int
    least_ns: int
    fits: bool

    @property
    def name(self) -> str:
        return ONE_DEVICE if len(self.ranks) == 1 else DATA_PARALLEL

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


def best_naive_plans(
    whole: LoadSearch,
    orders: Sequence[DeviceOrder],
    microbatch_sizes: Sequence[int],
    deadline: Deadline,
    work_ns: int,
) -> tuple[list[NaivePlan], float]:
    """Returns the best plan on one device, and the best on several, over some micro-batch sizes, and a bound.

    Args:
        whole: the search with two boundaries, the ends of the graph.
        orders: those of the devices in which several ones follow each other.
        deadline: when it has passed, no more sizes are looked at after the first.
        work_ns: no step of any plan takes less.

    Returns:
        The bound is on the times with which plans of one stage count that fit, infinite if there are none.
    """
    plans: dict[tuple[int, tuple[int, ...]], NaivePlan] = {}
    bound_ns = inf
    in_orders = [(order.ranks, whole.in_order(order.ranks)) for order in orders]
    links_of = [[slowest_links_from(own.cluster, start) for start in _starts(own)] for _, own in in_orders]
    for ((in_order, own), links), size in product(zip(in_orders, links_of, strict=True), microbatch_sizes):
        if plans and deadline.is_over:
            bound_ns = work_ns
            break
        for plan in _plans_of_size(own, size, links):
            ranks = tuple(in_order[rank] for rank in plan.ranks)
            # Several orders have plans on the same devices.
            plans.setdefault((size, ranks), replace(plan, ranks=ranks))
    best = []
    for name in (ONE_DEVICE, DATA_PARALLEL):
        of_name = sorted((plan for plan in plans.values() if plan.name == name), key=lambda plan: plan.sort_key)
        # Plans that do not fit sort last: if the first one does not, none does, and it is shown as the closest.
        if of_name and of_name[0].fits:
            fastest, of_name_ns = _fastest(whole, [plan for plan in of_name if plan.fits], deadline)
            best.append(fastest)
            bound_ns = min(bound_ns, of_name_ns)
        else:
            best += of_name[:1]
    return best, bound_ns


def _fastest(whole: LoadSearch, plans: Sequence[NaivePlan], deadline: Deadline) -> tuple[NaivePlan, int]:
    """Returns the best of some plans that fit, the one with the smallest load first, and a bound on all of them."""
    best = _no_longer_than_step(whole, plans[0])
    others = sorted(plans[1:], key=lambda plan: plan.least_ns)
    for number, plan in enumerate(others, start=1):
        # They are sorted: all that follow take no less.
        if plan.least_ns >= best.load_ns:
            break
        if number >= MAX_TIMED or deadline.is_over:
            return best, plan.least_ns
        best = min(best, _no_longer_than_step(whole, plan), key=lambda plan: plan.sort_key)
    return best, best.load_ns


def _starts(whole: LoadSearch) -> range:
    """The devices at which replicas may begin, as in the search of more stages."""
    num_devices = len(whole.cluster.devices)
    return range(num_devices if not whole.is_homogeneous and num_devices <= MAX_DEVICES_WITH_GAPS else 1)


def naive_alternatives(whole: LoadSearch, naive: Sequence[NaivePlan], load_ns: int) -> tuple[Alternative, ...]:
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
    return sort_alternatives(alternatives)


def _why_not(lack_bytes: int, extra_load: float) -> str:
    if lack_bytes > 0:
        return f"a device lacks {lack_bytes:,} bytes"
    return f"its largest load is {extra_load:.1%} larger" if extra_load else "as small a load as this plan's"


def _no_longer_than_step(whole: LoadSearch, plan: NaivePlan) -> NaivePlan:
    _, prediction = simulate_solution(whole, plan.solution(whole.boundaries.num_layers))
    return replace(plan, load_ns=min(plan.load_ns, prediction.step_ns))


Links = tuple[Bandwidth, ...]


def slowest_links_from(cluster: Cluster, start: int) -> list[Links]:
    """Returns for n = 1, 2, ... the links that can be the slowest among n devices from one on.

    These are the one with the least bandwidth, the one with the largest latency, and that of sums on a host.
    """
    # One device has no link, and its all-reduce takes no time.
    narrowest = latest = cluster.intra_host
    found: list[Links] = [(narrowest,)]
    # The hosts of the devices so far: a link within one, or between two of them, is met when a device joins.
    hosts = {cluster.devices[start].host}
    for rank in range(start + 1, len(cluster.devices)):
        links = [narrowest, latest] if rank > start + 1 else []
        # Links of their own can differ from pair to pair, and in the two directions.
        own = cluster.devices[rank].host
        if cluster.links:
            before = range(start, rank)
            links += [link for other in before for link in (cluster.link(rank, other), cluster.link(other, rank))]
        else:
            links += [cluster.intra_host] * (own in hosts) + [cluster.inter_host] * bool(hosts - {own})
        hosts.add(own)
        narrowest = min(links, key=lambda link: link.bytes_per_s)
        latest = max(links, key=lambda link: link.latency_ns)
        of_host = cluster.host_sum_link(range(start, rank + 1))
        found.append((narrowest, latest) if of_host is None else (narrowest, latest, of_host))
    return found


def _plans_of_size(whole: LoadSearch, size: int, links: Sequence[Sequence[Links]]) -> list[NaivePlan]:
    """Returns the plans of one stage at a size, on devices that follow each other.

    Args:
        links: of `slowest_links_from`, for each device at which replicas begin.
    """
    num_devices, num_microbatches = len(whole.cluster.devices), whole.minibatch_size // size
    sums_of = _sums_of_alike(whole, size)
    place = np.argsort(whole.fastest_first)  # of each rank among all, the fastest first; [ranks]
    plans = []
    for start, of_start in enumerate(links):
        # A device beyond the number of micro-batches would have nothing to do.
        counts = np.arange(1, min(num_devices - start, num_microbatches) + 1)
        loads: Ints = np.zeros(counts.size, dtype=np.int64)  # [counts]
        least, fits = loads.copy(), np.ones(counts.size, dtype=bool)
        seen = set()
        for rank in range(start, start + counts.size):
            sums, has_room = sums_of[rank]
            if (id(sums), has_room) in seen:
                continue  # the first of devices that are alike runs the most micro-batches
            seen.add((id(sums), has_room))
            # Where it takes part, and how many faster ones take part there. [counts]
            part = slice(rank - start, counts.size)
            positions = np.cumsum(place[start : start + counts.size] < place[rank])[part]
            load, shortest = _times_ns(sums, num_microbatches, counts[part], of_start[part], positions)
            loads[part] = np.maximum(loads[part], load)
            least[part] = np.maximum(least[part], shortest)
            fits[part] &= has_room
            if sums.num_without_replicas(0, -1):  # a layer that several devices cannot run
                fits[1:] = False
        plans += [
            NaivePlan(
                microbatch_size=size,
                ranks=tuple(sorted(range(start, start + count), key=place.__getitem__)),
                load_ns=int(load),
                least_ns=int(shortest),
                fits=bool(has_room),
            )
            for count, load, shortest, has_room in zip(counts, loads, least, fits, strict=True)
        ]
    # A single device may be any of them.
    first_of = {(id(sums), has_room): rank for rank, (sums, has_room) in reversed([*enumerate(sums_of)])}
    for rank in sorted(set(first_of.values()) - set(range(len(links)))):
        sums, has_room = sums_of[rank]
        load, shortest = _times_ns(sums, num_microbatches, np.array([1]), links[0][:1], np.array([0]))
        plans.append(
            NaivePlan(
                microbatch_size=size, ranks=(rank,), load_ns=int(load[0]), least_ns=int(shortest[0]), fits=has_room
            )
        )
    return plans


def _sums_of_alike(whole: LoadSearch, size: int) -> list[tuple[StageCostSums, bool]]:
    """Returns what the layers cost on each device, and whether they fit; one object for devices with equal costs."""
    cluster, nothing = whole.cluster, np.zeros(2, dtype=np.int64)  # crosses the ends of the graph
    sums: dict[tuple[str, float, Links], StageCostSums] = {}
    found = []
    for rank, device in enumerate(cluster.devices):
        key = device.kind, device.speed, tuple(cluster.member_links(rank))
        if key not in sums:
            profile = whole.profiles[device.kind]
            sums[key] = StageCostSums(
                whole.boundaries, profile, size, key[1], key[2], (nothing, nothing), host_sum_links(cluster)
            )
        found.append((sums[key], _fits(sums[key], whole.limits[rank])))
    return found


def _times_ns(
    sums: StageCostSums, num_microbatches: int, counts: Ints, links: Sequence[Links], positions: Ints
) -> tuple[Ints, Ints]:
    """Returns the loads of a device for some numbers of replicas, and times that no step beats.

    Both are [counts].

    Args:
        links, positions: for each of the numbers.
    """
    times = -(-(num_microbatches - positions) // counts)
    each, update = int(sums.microbatch_ns(0, -1)), int(sums.update_ns(0, -1))
    loads: Ints = times * each + update
    # The all-reduces begin when the last backward has begun.
    shortest = loads - each
    numbers = {of_count: number for number, of_count in enumerate(dict.fromkeys(links))}
    of_links = np.array([numbers[of_count] for of_count in links])
    # The all-reduce is a ring over the slowest link, which few numbers of replicas change.
    for of_count, number in numbers.items():
        some = of_links == number
        loads[some] += sums.all_reduce_ns(0, -1, counts[some], [slowest_of(of_count)])
        shortest[some] += sums.all_reduce_ns(0, -1, counts[some], of_count)
    return loads, np.maximum(times * each + update, shortest)


def _fits(sums: StageCostSums, limit_bytes: int) -> bool:
    """Returns whether all layers fit in memory, with the one micro-batch in flight that a single stage has."""
    return bool(sums.fits(np.array([0]), np.array([1]), 1, 1, limit_bytes)[0])
