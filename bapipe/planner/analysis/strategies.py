"""The strategies of ParaDL side by side (Kahira et al. 2021, arXiv:2104.09075), each as its fastest plan.

Data parallelism, layers split over all devices, a pipeline, the two mixes of data parallelism with split layers, data
parallelism whose members share parameters, and the best plan of all. Profiles of groups are given, or estimated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import msgspec

from bapipe.errors import BapipeError, Infeasible
from bapipe.estimates import check_whole, estimate
from bapipe.estimates.split_layers import tightest_limit
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile, ProfilesByKind, Split
from bapipe.planner.analysis.pinned import reasons_outside
from bapipe.planner.compute.deadline import Deadline, deadline_of
from bapipe.planner.inputs.device_grouping import profiles_used_by
from bapipe.planner.inputs.device_groups import with_groups
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import check_inputs, microbatch_sizes
from bapipe.planner.make import make
from bapipe.planner.plan import plan as plan_all_groupings
from bapipe.planner.plan import plan_once
from bapipe.planner.results.solution import preference, preferred_of
from bapipe.planner.stages.devices import fastest_first
from bapipe.simulator.tied_weights import legal_cuts

BEST_PLAN = "best plan"
SPLITS: tuple[Split, ...] = ("spatial", "filter", "channel", "tensor", "sharded")
"""The ways to split layers that the best plan is chosen from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The maximum number of devices that a strategy can use, and what sets it."""

    num_devices: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy and its fastest plan.

    Attributes:
        plan: None if there is none.
        profiles: by kind, those of the plan's devices.
        why_not: the reason why there is no plan, else empty.
        limit: None if it is not known, or if there is none but the devices.
    """

    plan: Plan | None = None
    profiles: ProfilesByKind
    why_not: str = ""
    limit: Limit | None = None


def compare_strategies(
    profiles: Sequence[ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    whole: Sequence[str] = (),
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Strategy]:
    """Returns every strategy by its name, with its fastest plan on all devices, or why it cannot be.

    Args:
        profiles: of single devices, one for each kind; measured profiles of groups are taken instead of estimates.
        whole: names of layers that every member of a group computes whole.
        progress: called with the name of the next strategy.

    Raises:
        BapipeError: the cluster or a profile is not of single devices; profiles, cluster and options do not match.
    """
    deadline = deadline or deadline_of(options.time_limit_s)
    planner = StrategyPlanner(profiles, cluster, options, whole)
    makers: dict[str, Callable[[], Strategy]] = {
        "data": planner.data,
        "spatial": lambda: planner.split_only("spatial"),
        "filter": lambda: planner.split_only("filter"),
        "channel": lambda: planner.split_only("channel"),
        "pipeline": lambda: planner.pipeline(deadline.share(2)),
        "data + spatial": lambda: planner.data_and_split("spatial"),
        "data + filter": lambda: planner.data_and_split("filter"),
        "sharded data": planner.sharded_data,
        BEST_PLAN: lambda: planner.best(deadline),
    }
    found = {}
    for name, make_strategy in makers.items():
        if progress:
            progress(name)
        found[name] = make_strategy()
    *others, best = found
    found[best] = planner.fastest(found[best], [found[name] for name in others])
    return found


class StrategyPlanner:
    """Makes the plan of each strategy, for given profiles, cluster and options."""

    def __init__(
        self, profiles: Sequence[ModelProfile], cluster: Cluster, options: PlanOptions, whole: Sequence[str]
    ) -> None:
        self.single = {profile.device.kind: profile for profile in profiles if profile.device.num_members == 1}
        self._given = {(p.device.kind, p.device.split, p.device.num_members): p for p in profiles}
        if len(self._given) < len(profiles):
            raise BapipeError("two profiles are of the same kind of device, members and split: give one for each")
        limits = options.limits(cluster)
        devices = (msgspec.structs.replace(d, memory_bytes=n) for d, n in zip(cluster.devices, limits, strict=True))
        self.cluster = msgspec.structs.replace(cluster, devices=tuple(devices)).sequential
        self.options, self._whole = replace(options, memory_limit_bytes=None, memory_margin=0.0), whole
        if any(device.num_members > 1 for device in cluster.devices):
            raise BapipeError("the cluster has groups already: give one of single devices to compare strategies")
        check_inputs(self.single, self.cluster, self.options)
        check_whole(next(iter(self.single.values())), whole)
        self.layers = next(iter(self.single.values())).layers

    def data(self) -> Strategy:
        """One stage, with a replica on each device."""
        return self._on_groups(self.single, self.cluster, self._data_limit())

    def split_only(self, split: Split) -> Strategy:
        """One stage on a group of all devices."""
        num, hosts = len(self.cluster.devices), {device.host for device in self.cluster.devices}
        limit = self._split_limit(split)
        if num == 1:
            return self._without(_ONE_DEVICE, limit)
        if len(hosts) > 1:
            return self._without(
                f"the members of a group are on one host, and the {num} devices are on {len(hosts)} hosts", limit
            )
        return self._grouped(split, [num], limit)

    def data_and_split(self, split: Split) -> Strategy:
        """Replicas of one stage, each on a group; the fastest size of groups that leaves two replicas."""
        sizes = [size for size in self._group_sizes() if size < len(self.cluster.devices)]
        return self._grouped(split, sizes, self._product_limit(split))

    def sharded_data(self) -> Strategy:
        """Replicas of one stage, each on a group that shares samples and parameters; the fastest size of groups."""
        samples = self.options.minibatch_size
        return self._grouped("sharded", self._group_sizes(), Limit(num_devices=samples, reason=f"{samples} samples"))

    def pipeline(self, deadline: Deadline) -> Strategy:
        """The fastest plan without replicas or groups."""
        most = min(len(legal_cuts(profile.layers)) for profile in self.single.values()) + 1
        together = "" if most == len(self.layers) else f", of which {most} parts can be in stages of their own"
        limit = Limit(num_devices=most, reason=f"{len(self.layers)} layers{together}")
        try:
            options = replace(self.options, replicas=False)
            made = plan_once(self.single, self.cluster, options, deadline=deadline)
        except BapipeError as error:
            return self._without(str(error), limit)
        return Strategy(plan=made, profiles=self.single, limit=limit)

    def best(self, deadline: Deadline) -> Strategy:
        """The fastest plan on single devices, or on groups of any size and split that the layers allow."""
        given = [*self.single.values()]
        for split in SPLITS:
            for size in self._group_sizes():
                try:
                    given += self._profiles(split, size).values()
                except BapipeError:
                    continue  # a split that is not possible; the rows of the strategies say why
        try:
            made = plan_all_groupings(given, self.cluster, self.options, deadline=deadline)
        except BapipeError as error:
            return self._without(str(error), None)
        return Strategy(plan=made, profiles=profiles_used_by(made, given))

    def fastest(self, best: Strategy, others: Sequence[Strategy]) -> Strategy:
        """Returns the best plan, or a preferred one of another strategy in its space: its search may be cut off."""
        for other in others:
            if other.plan is None or reasons_outside(other.plan, other.profiles, self.options):
                continue
            made = other.plan if best.plan is None else preferred_of(best.plan, other.plan)
            if made is not best.plan:
                best = Strategy(plan=made, profiles=other.profiles, limit=best.limit)
        return best

    def _grouped(self, split: Split, sizes: Sequence[int], limit: Limit | None) -> Strategy:
        """The fastest of one stage with replicas on groups of one of the sizes, or why there is none."""
        found: list[Strategy] = []
        for size in sizes:
            try:
                profiles = self._profiles(split, size)
                found.append(self._on_groups(profiles, self._groups_of(size), limit))
            except BapipeError as error:
                found.append(self._without(str(error), limit))
        if not found:
            return self._without(self._no_groups(), limit)
        return min(found, key=lambda each: each.plan.prediction.step_ns if each.plan else float("inf"))

    def _on_groups(self, profiles: ProfilesByKind, cluster: Cluster, limit: Limit | None) -> Strategy:
        """One stage with a replica on each device or group of a cluster, at the fastest micro-batch size."""
        try:
            made = self._one_stage(profiles, cluster)
        except BapipeError as error:
            return self._without(str(error), limit)
        return Strategy(plan=made, profiles=profiles, limit=limit)

    def _one_stage(self, profiles: ProfilesByKind, cluster: Cluster) -> Plan:
        num_replicas, samples = len(cluster.devices), self.options.minibatch_size
        sizes = microbatch_sizes(profiles, cluster, self.options)
        if samples // sizes[0] < num_replicas:
            raise BapipeError(
                f"a mini-batch of {samples} has {samples // sizes[0]} micro-batches of {sizes[0]} for {num_replicas} "
                "replicas: choose a larger `minibatch_size`, or larger groups"
            )
        plans: list[Plan] = []
        for size in (size for size in sizes if samples // size >= num_replicas):
            try:
                plans.append(self._at(size, profiles, cluster))
            except Infeasible as error:
                too_large = error
        if not plans:
            raise too_large
        return min(plans, key=preference)

    def _at(self, size: int, profiles: ProfilesByKind, cluster: Cluster) -> Plan:
        """One stage at a micro-batch size; recomputed if it does not fit otherwise and the options allow it."""
        names = fastest_first(profiles, cluster)
        for recompute in ((), (0,)):
            try:
                return make(
                    profiles,
                    cluster,
                    minibatch_size=self.options.minibatch_size,
                    microbatch_size=size,
                    cuts=(),
                    devices=[names],
                    recompute=recompute,
                )
            except Infeasible as error:
                if not self.options.recompute:
                    raise
                too_large = error
        raise too_large

    def _profiles(self, split: Split, num_members: int) -> dict[str, ModelProfile]:
        """The profile of each kind's groups: the one given, else an estimate."""
        used = sorted({device.kind for device in self.cluster.devices})
        return {
            kind: self._given.get((kind, split, num_members)) or self._estimate(kind, split, num_members)
            for kind in used
        }

    def _estimate(self, kind: str, split: Split, num_members: int) -> ModelProfile:
        estimated = estimate(self.single[kind], split, num_members, self.cluster, whole=self._whole)
        if split != "sharded" and tightest_limit(self.layers, split, self._whole) is None:
            raise BapipeError(f"no layer of {estimated.model} can be split so, besides those computed whole")
        return estimated

    def _groups_of(self, num_members: int) -> Cluster:
        """The cluster with the devices of every kind in groups."""
        grouped = self.cluster
        for kind in dict.fromkeys(device.kind for device in self.cluster.devices):
            grouped = with_groups(grouped, kind, num_members)
        return grouped

    def _group_sizes(self) -> list[int]:
        """The numbers of members of which groups tile every host, ascending."""
        alike = gcd(*self._counts())
        return [size for size in range(2, alike + 1) if alike % size == 0]

    def _counts(self) -> list[int]:
        """How many devices of a kind each host has."""
        places = [(device.host, device.kind) for device in self.cluster.devices]
        return [places.count(place) for place in dict.fromkeys(places)]

    def _no_groups(self) -> str:
        if len(self.cluster.devices) == 1:
            return _ONE_DEVICE
        counts = " and ".join(str(count) for count in sorted(set(self._counts())))
        return (
            "there is no size of at least 2 for two groups or more: it has to divide the number of devices of a kind "
            f"on every host, {counts}"
        )

    def _data_limit(self) -> Limit:
        samples = self.options.minibatch_size
        smallest = microbatch_sizes(self.single, self.cluster, self.options)[0]
        reason = f"{samples} samples" + (f" in micro-batches of at least {smallest}" if smallest > 1 else "")
        return Limit(num_devices=samples // smallest, reason=reason)

    def _split_limit(self, split: Split) -> Limit | None:
        """The fewest of what the layers can share among the members, or the devices of a host."""
        most = max(self._counts())
        tightest = tightest_limit(self.layers, split, self._whole)
        if tightest is None:
            return None
        if tightest.most < most:
            return Limit(num_devices=tightest.most, reason=tightest.limit)
        return Limit(num_devices=most, reason=f"{most} devices on a host (the layers: {tightest.limit})")

    def _product_limit(self, split: Split) -> Limit | None:
        data, split_limit = self._data_limit(), self._split_limit(split)
        if split_limit is None:
            return None
        num_devices = data.num_devices * split_limit.num_devices
        return Limit(num_devices=num_devices, reason=f"{data.reason}; {split_limit.reason}")

    def _without(self, why_not: str, limit: Limit | None) -> Strategy:
        return Strategy(profiles=self.single, why_not=why_not, limit=limit)


_ONE_DEVICE = "there is one device, and nothing to share"
