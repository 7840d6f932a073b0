"""How much faster a step would be with 10 % more of each resource."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from bapipe.cluster import Cluster
from bapipe.plan import Plan
from bapipe.profile import ModelProfile
from bapipe.search.explore import solve
from bapipe.search.options import Options
from bapipe.simulate import simulate
from bapipe.units import MAX_INT


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The step time of a plan with 10 % more of one resource.

    Attributes:
        planned_again: whether it is that of the best plan then, not of the same plan.
    """

    resource: str
    step_ns: int
    planned_again: bool = False


def sensitivity(
    plan: Plan, profiles: Mapping[str, ModelProfile], options: Options, *, stop: Callable[[], bool] | None = None
) -> tuple[Effect, ...]:
    """Returns the effect of more speed of each device, more bandwidth of each link, and more memory; largest first.

    Speeds and links are judged with the same plan. Memory is planned for again, because the same plan would not use it.
    """
    effects = [
        Effect(resource=name, step_ns=simulate(msgspec.structs.replace(plan, cluster=cluster), profiles).step_ns)
        for name, cluster in _changed(plan)
    ]
    limits = options.memory_limit_bytes
    more = replace(options, memory_limit_bytes=None if limits is None else _tenth_more(limits))
    devices = tuple(msgspec.structs.replace(d, memory_bytes=_tenth_more(d.memory_bytes)) for d in plan.cluster.devices)
    _, found = solve(profiles, msgspec.structs.replace(plan.cluster, devices=devices), more, stop=stop)
    step_ns = min(found.step_ns, plan.prediction.step_ns)
    effects.append(Effect(resource="memory of every device", step_ns=step_ns, planned_again=True))
    return tuple(sorted(effects, key=lambda effect: (effect.step_ns, effect.resource)))


def _changed(plan: Plan) -> list[tuple[str, Cluster]]:
    """The plan's cluster with each device faster, and with each link faster."""
    cluster = plan.cluster
    used = {name for stage in plan.stages for name in stage.devices}
    found = []
    for rank, device in enumerate(cluster.devices):
        if device.name in used:
            faster = msgspec.structs.replace(device, speed=round(device.speed * 1.1, 12))
            devices = (*cluster.devices[:rank], faster, *cluster.devices[rank + 1 :])
            found.append((f"speed of {device.name}", msgspec.structs.replace(cluster, devices=devices)))
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


def _tenth_more(value: int) -> int:
    return min(value + -(-value // 10), MAX_INT)
