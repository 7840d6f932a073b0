"""From the best plan of the named schedules to the best order found for its stages."""

from collections.abc import Mapping, Sequence

import msgspec

from bapipe.cost import stages_of
from bapipe.plan import Alternative, Plan, certify
from bapipe.profile import ModelProfile
from bapipe.schedule import Schedule
from bapipe.schedules import ALL
from bapipe.search.order import search_order
from bapipe.search.placing import place
from bapipe.simulate import judge

SEARCH = "search"
"""What a plan whose order was searched calls its schedule."""


def reorder(plan: Plan, profiles: Mapping[str, ModelProfile], limits: Sequence[int], effort: float) -> Plan:
    """Returns the plan with the fastest order found for its stages, the plan itself where that is no faster.

    The stages stay as they are, and the certificate says so. The search starts from every named schedule that suits
    them.
    """
    table = plan.table
    costs = stages_of(plan.stages, profiles, plan.cluster, plan.microbatch_size)
    found = search_order(
        costs,
        table.devices,
        plan.cluster,
        num_microbatches=plan.num_microbatches,
        memory_bytes=limits,
        start=[table, *_suitable(table)],
        effort=effort,
    )
    assert found.schedule is not None
    assert found.step_ns is not None
    assert found.lower_bound_ns is not None
    if found.step_ns >= plan.prediction.step_ns:
        return plan
    before = plan.prediction
    slower = before.step_ns / found.step_ns - 1
    named = Alternative(
        name=plan.schedule,
        step_ns=before.step_ns,
        peak_bytes=max(rank.peak_bytes for rank in before.ranks),
        feasible=True,
        why_not=f"{slower:.1%} slower, with the same stages",
    )
    return msgspec.structs.replace(
        plan,
        schedule=SEARCH,
        order=tuple(tuple(map(str, actions)) for actions in found.schedule.order),
        prediction=judge(found.schedule, costs, plan.cluster).prediction(plan.minibatch_size),
        certificate=certify(
            found.step_ns,
            found.lower_bound_ns,
            f"every order of F, B, I and W for these stages; the stages are the best for {plan.schedule}, chosen "
            f"from {plan.certificate.space}",
        ),
        alternatives=(named,),
    )


def _suitable(table: Schedule) -> list[Schedule]:
    """The named schedules for the same stages on the same devices."""
    ranks = list(dict.fromkeys(devices[0] for devices in table.devices))
    made = (place(build(len(ranks), table.num_microbatches), ranks, len(table.order)) for build in ALL.values())
    return [schedule for schedule in made if schedule.devices == table.devices]
