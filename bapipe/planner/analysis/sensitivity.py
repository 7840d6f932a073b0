"""Sensitivity: how much shorter a step would be with 10 % more of each resource."""

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import msgspec

from bapipe.errors import ConstraintsUnmet, Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.analysis.pinned import BEST_FOUND
from bapipe.planner.compute.deadline import UNLIMITED, Deadline, OutOfTime
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan_step import solve_partition
from bapipe.planner.search_request import SearchRequest
from bapipe.simulator.simulate import simulate
from bapipe.units import MAX_INT

UNLIMITED_BYTES = 2**60
"""More memory than any plan can use."""


MEMORY, UNLIMITED_MEMORY = "memory of every device", "unlimited memory"
"""Resources for which the step is planned again: 10 % more memory, and unlimited memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The step time of a plan with 10 % more of one resource.

    Attributes:
        without_ns: its step time without.
        is_replanned: whether the times are those of the best plans found, not of the same plan.
    """

    resource: str
    step_ns: int
    without_ns: int
    is_replanned: bool = False

    @property
    def ratio(self) -> float:
        """The step time, relative to that without; 1 if there is none."""
        return self.step_ns / self.without_ns if self.without_ns else 1.0


def sensitivity(
    plan: Plan, profiles: ProfilesByKind, options: PlanOptions, *, deadline: Deadline = UNLIMITED
) -> tuple[Effect, ...]:
    """Returns the effect of more speed of devices, more bandwidth of links, and more memory; largest first.

    For speeds and links the same plan is simulated. For memory the step is planned again, because the same plan would
    not use more. Effects for which the deadline leaves no time are left out.
    """
    effects = [
        Effect(
            resource=name,
            step_ns=simulate(msgspec.structs.replace(plan, cluster=changed()), profiles).step_ns,
            without_ns=plan.prediction.step_ns,
        )
        for name, changed in takewhile(lambda _: not deadline.is_over, changes_of_resources(plan).items())
    ]
    with suppress(OutOfTime):
        effects += _more_memory(plan, profiles, options, deadline)
    return tuple(sorted(effects, key=lambda effect: (effect.ratio, effect.resource)))


def _more_memory(plan: Plan, profiles: ProfilesByKind, options: PlanOptions, deadline: Deadline) -> list[Effect]:
    """Returns the effects of more memory on the best plan.

    The given one may not be the best for its own memory: it may be made by hand, or be the best of other options.
    """

    def planned_ns(memory_bytes: Sequence[int], limit: int | None, known_ns: int) -> int:
        """The step of the best plan under a limit, if it is shorter than a known one."""
        devices = tuple(
            msgspec.structs.replace(device, memory_bytes=num_bytes)
            for device, num_bytes in zip(plan.cluster.devices, memory_bytes, strict=True)
        )
        cluster = msgspec.structs.replace(plan.cluster, devices=devices)
        # With the same schedules and replicas as the plan had, so that a difference is one of memory.
        changed = replace(options, memory_limit_bytes=limit)
        deadline.check()
        request = SearchRequest(profiles=profiles, cluster=cluster, options=changed, deadline=deadline)
        try:
            return min(known_ns, solve_partition(request).prediction.step_ns)
        except (Infeasible, ConstraintsUnmet):  # along the profile's order, which the plan need not have
            return known_ns

    memory_bytes = [device.memory_bytes for device in plan.cluster.devices]
    limit = options.memory_limit_bytes
    others_ns = (other.step_ns for other in plan.alternatives if other.name == BEST_FOUND)
    without_ns = min((plan.prediction.step_ns, *others_ns))
    all_ns = planned_ns([UNLIMITED_BYTES] * len(memory_bytes), None, without_ns)
    if all_ns < without_ns:
        without_ns = planned_ns(memory_bytes, limit, without_ns)
        all_ns = min(all_ns, without_ns)
    more_ns = without_ns
    # If unlimited memory does not help, 10 % more does not either.
    if all_ns < without_ns:
        more_limit = None if limit is None else _tenth_more(limit)
        more_ns = planned_ns(list(map(_tenth_more, memory_bytes)), more_limit, without_ns)
    return [
        Effect(resource=UNLIMITED_MEMORY, step_ns=all_ns, without_ns=without_ns, is_replanned=True),
        Effect(resource=MEMORY, step_ns=more_ns, without_ns=without_ns, is_replanned=True),
    ]


def changes_of_resources(plan: Plan) -> dict[str, Callable[[], Cluster]]:
    """Returns what makes the plan's cluster with each device, each stage's devices, and each link faster.

    The keys say which resource it is.
    """
    cluster = plan.cluster
    changed: dict[str, Callable[[], Cluster]] = {  # a device may have several stages
        f"speed of {name}": partial(_faster, cluster, {name}) for stage in plan.stages for name in stage.devices
    }
    for s, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            title = f"speed of the {len(stage.devices)} devices of stage {s}"
            changed[title] = partial(_faster, cluster, set(stage.devices))
    for name, title in (("intra_host", "links within hosts"), ("inter_host", "links between hosts")):
        changed[f"bandwidth of {title}"] = partial(_with_faster_links, cluster, name)
    # Links that the cluster lists by themselves override the two above.
    for i, link in enumerate(cluster.links):
        changed[f"bandwidth of the link from {link.source} to {link.target}"] = partial(_with_faster_link, cluster, i)
    return changed


def _with_faster_links(cluster: Cluster, name: str) -> Cluster:
    link = getattr(cluster, name)
    return msgspec.structs.replace(
        cluster, **{name: msgspec.structs.replace(link, bytes_per_s=_tenth_more(link.bytes_per_s))}
    )


def _with_faster_link(cluster: Cluster, i: int) -> Cluster:
    link = cluster.links[i]
    faster = msgspec.structs.replace(link, bytes_per_s=_tenth_more(link.bytes_per_s))
    return msgspec.structs.replace(cluster, links=(*cluster.links[:i], faster, *cluster.links[i + 1 :]))


def _faster(cluster: Cluster, names: Container[str]) -> Cluster:
    devices = tuple(
        msgspec.structs.replace(device, speed=round(device.speed * 1.1, 12)) if device.name in names else device
        for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)


def _tenth_more(value: int) -> int:
    return min(value + -(-value // 10), MAX_INT)
