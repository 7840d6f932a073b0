"""The stages of minimal load at one micro-batch size, over given boundaries and devices."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import TYPE_CHECKING

from msgspec import structs

from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.stages.devices import ranks_fastest_first
from bapipe.planner.throughput.heterogeneous import HeterogeneousDevices
from bapipe.planner.throughput.homogeneous import HomogeneousDevices
from bapipe.planner.throughput.loads import Boundaries, StageCostSums, host_sum_links, slowest_of
from bapipe.planner.throughput.min_devices_dp import find_plan_below, min_max_load_homogeneous
from bapipe.planner.throughput.min_max_dp import min_max_load
from bapipe.planner.throughput.problem import MinMaxLoad
from bapipe.progress import LoadProgress
from bapipe.simulator.interval_costs import cut_bytes

if TYPE_CHECKING:
    from bapipe.planner.throughput.homogeneous import DevicesAround

Stage = tuple[tuple[int, ...], tuple[int, ...]]
"""Layers, and ranks of the devices in the order in which they take micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSolution:
    """The stages of minimal load at one micro-batch size, none if nothing fits; no plan's load is below the bound."""

    microbatch_size: int
    load_ns: int
    bound_ns: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSearch:
    """What is searched.

    Attributes:
        limits: the bytes that each device may hold.
        has_all_downsets: whether the boundaries are all downsets, so that bounds are proofs.
        has_equal_replicas: whether stages of unlike devices are searched with equally many only.
        below_ns: of unlike devices only plans with a smaller load are searched for.
    """

    profiles: ProfilesByKind
    cluster: Cluster
    boundaries: Boundaries
    has_all_downsets: bool
    limits: tuple[int, ...]
    minibatch_size: int
    has_equal_replicas: bool = False
    below_ns: float = inf

    def in_order(self, ranks: Sequence[int]) -> "LoadSearch":
        """Returns the search in which stages take the devices in an order of their ranks, and whose ranks are new."""
        cluster = structs.replace(self.cluster, devices=tuple(self.cluster.devices[rank] for rank in ranks))
        return replace(self, cluster=cluster, limits=tuple(self.limits[rank] for rank in ranks))

    @property
    def is_homogeneous(self) -> bool:
        """Whether only the number of devices matters."""
        return is_homogeneous(self.cluster, self.limits)

    @property
    def fastest_first(self) -> tuple[int, ...]:
        """All ranks, in the order in which those of one stage take micro-batches."""
        return ranks_fastest_first(self.profiles, self.cluster)

    def solve(
        self, microbatch_size: int, progress: LoadProgress | None = None, deadline: Deadline = UNLIMITED
    ) -> LoadSolution:
        """Returns the best stages with micro-batches of one size that were found before the deadline, and a bound."""

        def report(load_ns: float, search_bound_ns: float) -> None:
            # If only some of the downsets are boundaries, the bound of the search does not hold for the others.
            if progress is not None:
                progress(load_ns, search_bound_ns if self.has_all_downsets else bound_ns)

        if self.is_homogeneous:
            homogeneous = self.homogeneous(microbatch_size)
            bound_ns, ceiling_ns = homogeneous.bound_ns, homogeneous.ceiling_ns
            result = min_max_load_homogeneous(
                homogeneous, bound=bound_ns, ceiling=ceiling_ns, progress=report, deadline=deadline
            )
            replicas = _consecutive_replicas(result)
        else:
            heterogeneous = self.heterogeneous(microbatch_size)
            bound_ns, ceiling_ns = heterogeneous.bound_ns, min(heterogeneous.ceiling_ns, self.below_ns)
            result = min_max_load(
                heterogeneous, bound=bound_ns, ceiling=ceiling_ns, dtype=int, progress=report, deadline=deadline
            )
            replicas = [heterogeneous.replicas(state) for state in result.best.states] if result.best else []
        return self._solution(microbatch_size, result, result.bound if self.has_all_downsets else bound_ns, replicas)

    def solve_between(
        self,
        microbatch_size: int,
        bound_ns: float,
        ceiling_ns: float,
        devices_around: "DevicesAround",
        deadline: Deadline,
    ) -> LoadSolution:
        """Returns the best stages on equal devices with a load from a bound to a ceiling, if there are any."""
        problem = self.homogeneous(microbatch_size, devices_around)
        best = find_plan_below(problem, ceiling_ns, deadline)
        result = MinMaxLoad(best=best, bound=bound_ns if best is not None else ceiling_ns)
        if best is not None:
            result = min_max_load_homogeneous(problem, bound=bound_ns, ceiling=ceiling_ns, best=best, deadline=deadline)
        return self._solution(microbatch_size, result, result.bound, _consecutive_replicas(result))

    def solve_any(self, microbatch_size: int, deadline: Deadline) -> LoadSolution:
        """Returns stages that fit, none if none were found; of equal devices any, which takes less than the best."""
        if not self.is_homogeneous:
            return self.solve(microbatch_size, deadline=deadline)
        problem, best = self.homogeneous(microbatch_size), None
        with suppress(OutOfTime):
            best = find_plan_below(problem, problem.ceiling_ns, deadline)
        result = MinMaxLoad(best=best, bound=problem.bound_ns)
        return self._solution(microbatch_size, result, result.bound, _consecutive_replicas(result))

    def _solution(
        self, microbatch_size: int, result: MinMaxLoad, bound_ns: float, replicas: Sequence[tuple[int, ...]]
    ) -> LoadSolution:
        if result.best is None:
            return LoadSolution(microbatch_size=microbatch_size, load_ns=0, bound_ns=ceil(bound_ns), stages=())
        intervals = pairwise(result.best.boundaries)
        return LoadSolution(
            microbatch_size=microbatch_size,
            load_ns=int(result.best.load),
            bound_ns=ceil(bound_ns),
            stages=tuple(
                (tuple(self.boundaries.layers(begin, end)), ranks)
                for (begin, end), ranks in zip(intervals, replicas, strict=True)
            ),
        )

    def homogeneous(self, microbatch_size: int, devices_around: "DevicesAround | None" = None) -> HomogeneousDevices:
        """Returns the problem if all devices are the same."""
        device, link = self.cluster.devices[0], self.cluster.link(0, len(self.cluster.devices) - 1)
        of_host = self.cluster.host_sum_link(range(len(self.cluster.devices)))
        return HomogeneousDevices(
            self.boundaries,
            StageCostSums(
                self.boundaries,
                self.profiles[device.kind],
                microbatch_size,
                device.speed,
                self.cluster.member_links(0),
                host_sum=host_sum_links(self.cluster),
            ),
            num_devices=len(self.cluster.devices),
            num_microbatches=self.minibatch_size // microbatch_size,
            link=link,
            ring=link if of_host is None else slowest_of([link, of_host]),
            overlaps=device.overlaps_transfers,
            memory_bytes=self.limits[0],
            devices_around=devices_around,
        )

    def heterogeneous(self, microbatch_size: int) -> HeterogeneousDevices:
        """Returns the problem for any devices."""
        kinds = sorted({device.kind for device in self.cluster.devices})
        crossing = {kind: cut_bytes(self.profiles[kind], microbatch_size, self.boundaries.inside) for kind in kinds}

        @cache
        def sums_of(kind: str, speed: float, member_links: tuple[Bandwidth, ...]) -> StageCostSums:
            return StageCostSums(
                self.boundaries,
                self.profiles[kind],
                microbatch_size,
                speed,
                member_links,
                crossing[kind],
                host_sum_links(self.cluster),
            )

        return HeterogeneousDevices(
            self.boundaries,
            [
                sums_of(device.kind, device.speed, tuple(self.cluster.member_links(rank)))
                for rank, device in enumerate(self.cluster.devices)
            ],
            self.cluster,
            num_microbatches=self.minibatch_size // microbatch_size,
            memory_bytes=self.limits,
            fastest_first=self.fastest_first,
            has_equal_replicas=self.has_equal_replicas,
        )


def is_homogeneous(cluster: Cluster, limits: Sequence[int]) -> bool:
    """Returns whether devices differ only in their names, so that only their number matters."""
    kinds = {
        (device.kind, device.speed, device.overlaps_transfers, limit)
        for device, limit in zip(cluster.devices, limits, strict=True)
    }
    hosts = {device.host for device in cluster.devices}
    # A ring within a host takes its compute, and one over several hosts does not.
    one_link = cluster.hosts_are_alike or len(hosts) in (1, len(cluster.devices))
    return len(kinds) == 1 and one_link and not cluster.links


def _consecutive_replicas(result: MinMaxLoad) -> list[tuple[int, ...]]:
    """Returns the devices of each stage of a homogeneous plan: states are counts."""
    counts = result.best.states if result.best else ()
    return [tuple(range(stop - count, stop)) for count, stop in zip(counts, accumulate(counts), strict=True)]
