"""How much faster a step would be with 10 % more of each resource."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.action_order.improve_plan import SEARCH
from bapipe.planner.analysis.pinned import BEST_FOUND
from bapipe.planner.options import PlanOptions
from bapipe.planner.plan_step import find_best_layout
from bapipe.simulator.simulate import simulate
from bapipe.units import MAX_INT

UNLIMITED_BYTES = 2**60
"""More memory than any plan can use."""


MEMORY, UNLIMITED_MEMORY = "memory of every device", "memory without limit"
"""Resources that another plan is made for; of the second there is all that a plan could use, not 10 % more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The step time of a plan with 10 % more of one resource.

    Attributes:
        is_replanned: whether it is that of the best plan then, not of the same plan.
    """

    resource: str
    step_ns: int
    is_replanned: bool = False


def sensitivity(
    plan: Plan, profiles: Mapping[str, ModelProfile], options: PlanOptions, *, stop: Callable[[], bool] | None = None
) -> tuple[Effect, ...]:
    """Returns the effect of more speed of devices, more bandwidth of links, and more memory; largest first.

    Speeds and links are judged with the same plan. Memory is planned for again, because the same plan would not use it.
    """
    effects = [
        Effect(resource=name, step_ns=simulate(msgspec.structs.replace(plan, cluster=cluster), profiles).step_ns)
        for name, cluster in _changed(plan)
    ]
    effects += _more_memory(plan, profiles, options, stop)
    return tuple(sorted(effects, key=lambda effect: (effect.step_ns, effect.resource)))


def _more_memory(
    plan: Plan, profiles: Mapping[str, ModelProfile], options: PlanOptions, stop: Callable[[], bool] | None
) -> list[Effect]:
    """What memory changes beside what planning again changes without it; a plan made by hand need not be the best."""
    known = [plan.prediction.step_ns, *(other.step_ns for other in plan.alternatives if other.name == BEST_FOUND)]

    def planned_ns(memory_bytes: Sequence[int], limit: int | None) -> int:
        devices = tuple(
            msgspec.structs.replace(device, memory_bytes=num_bytes)
            for device, num_bytes in zip(plan.cluster.devices, memory_bytes, strict=True)
        )
        cluster = msgspec.structs.replace(plan.cluster, devices=devices)
        same = options.replicas and SEARCH not in options.schedules  # an order is searched without replicas
        asked = replace(options, memory_limit_bytes=limit, replicas=same)
        _, found = find_best_layout(profiles, cluster, asked, stop=stop)
        return plan.prediction.step_ns if found.step_ns >= min(known) else found.step_ns

    have = [device.memory_bytes for device in plan.cluster.devices]
    limit = options.memory_limit_bytes
    all_ns = more_ns = planned_ns([UNLIMITED_BYTES] * len(have), None)
    if all_ns < plan.prediction.step_ns:
        more_ns = planned_ns(list(map(_tenth_more, have)), None if limit is None else _tenth_more(limit))
    return [
        Effect(resource=UNLIMITED_MEMORY, step_ns=all_ns, is_replanned=True),
        Effect(resource=MEMORY, step_ns=more_ns, is_replanned=True),
    ]


def _changed(plan: Plan) -> list[tuple[str, Cluster]]:
    """The plan's cluster with each device, each stage's devices, and each link faster."""
    cluster = plan.cluster
    found = [(f"speed of {name}", _faster(cluster, {name})) for stage in plan.stages for name in stage.devices]
    for s, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            title = f"speed of the {len(stage.devices)} devices of stage {s}"
            found.append((title, _faster(cluster, set(stage.devices))))
    found = list(dict(found).items())  # a device may have several stages
    for name, title in (("intra_host", "links within hosts"), ("inter_host", "links between hosts")):
        link = getattr(cluster, name)
        faster_link = msgspec.structs.replace(link, bytes_per_s=_tenth_more(link.bytes_per_s))
        found.append((f"bandwidth of {title}", msgspec.structs.replace(cluster, **{name: faster_link})))
    for place, own in enumerate(cluster.links):
        faster_own = msgspec.structs.replace(own, bytes_per_s=_tenth_more(own.bytes_per_s))
        links = (*cluster.links[:place], faster_own, *cluster.links[place + 1 :])
        title = f"bandwidth of the link from {own.source} to {own.target}"
        found.append((title, msgspec.structs.replace(cluster, links=links)))
    return found


def _faster(cluster: Cluster, names: Container[str]) -> Cluster:
    devices = tuple(
        msgspec.structs.replace(device, speed=round(device.speed * 1.1, 12)) if device.name in names else device
        for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)


def _tenth_more(value: int) -> int:
    return min(value + -(-value // 10), MAX_INT)
