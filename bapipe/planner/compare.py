"""Every strategy side by side: the best plan of each schedule, beside what people would otherwise do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Alternative, Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.options import PlanOptions
from bapipe.planner.plan import plan_once


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Strategies for the same mini-batch on the same devices.

    Attributes:
        plans: the best plan of each, by its name.
        others: one device, data parallelism and equal layers, as the best plan judges them.
        failed: why there is no plan of a strategy, by its name.
    """

    plans: Mapping[str, Plan]
    others: tuple[Alternative, ...]
    failed: Mapping[str, str]

    @property
    def best(self) -> Plan:
        return min(self.plans.values(), key=lambda plan: plan.prediction.step_ns)


def compare(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    time_limit_s: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> Comparison:
    """Returns the best plan of every schedule with one device a stage, and the best of all of them with replicas.

    Args:
        time_limit_s: for each search.
        tell: called with what is searched next.

    Raises:
        BapipeError: there is no plan at all; the message is that of the last search.
    """
    searches = {name: replace(options, schedules=[name], replicas=False) for name in options.schedules}
    if options.replicas:
        searches["any of them, with replicas"] = options
    plans: dict[str, Plan] = {}
    failed: dict[str, str] = {}
    for name, asked in searches.items():
        if tell:
            tell(name)
        try:
            plans[name] = plan_once(profiles, cluster, asked, time_limit_s=time_limit_s)
        except BapipeError as error:
            failed[name], last = str(error), error
    if not plans:
        raise last
    found = Comparison(plans=plans, others=(), failed=failed)
    return replace(found, others=found.best.alternatives)
