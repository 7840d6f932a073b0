"""What the groups of a plan exchange, and what larger or smaller groups would change, as sentences."""

from bapipe.formats.plan import Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.analysis.exchange import exchange_share

NOT_SEARCHED = (
    "Intra-layer split: not searched; every device computes whole layers. To share layers among devices of a host, "
    "plan with the profile of such a group too (`bapipe estimate`)."
)


def intra_layer(plan: Plan, profiles: ProfilesByKind) -> str:
    """Returns whether the plan splits layers over groups, how much of their time is exchange, and the other ways."""
    others = [
        f"{other.name}: {other.step_ns / 1e6:,.1f} ms per step, {other.why_not}"
        for other in plan.alternatives
        if " group" in other.name or " device" in other.name
    ]
    exchanged = [text for s in range(len(plan.stages)) if (text := _exchange_of(plan, s, profiles))]
    if not exchanged and not any(" group" in other for other in others):
        return NOT_SEARCHED
    used = f"used; {'; '.join(exchanged)}" if exchanged else "not used"
    return f"Intra-layer split: {used}. {'. '.join(others)}{'.' if others else ''}".strip()


def _exchange_of(plan: Plan, s: int, profiles: ProfilesByKind) -> str:
    """How much of the compute of a stage its groups exchange data; empty for a stage on single devices."""
    stage = plan.stages[s]
    device = plan.cluster.devices[plan.cluster.index[stage.devices[0]]]
    profile = profiles.get(device.kind)
    if device.num_members == 1 or profile is None:
        return ""
    share = exchange_share(stage, profile, plan.microbatch_size, device.speed)
    return (
        f"of the F and B of stage {s}, the {device.num_members} members of {device.name} exchange data for {share:.1%}"
    )
