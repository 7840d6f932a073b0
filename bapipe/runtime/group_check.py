"""Refuses plans on groups: a run splits a model between its layers, not the layers themselves."""

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan


def check_no_groups(plan: Plan) -> None:
    """Raises BapipeError if a stage of a plan is on a group, whose members would have to split layers."""
    used = (device for device in plan.cluster.devices if device.name in plan.used_devices)
    group = next((device for device in used if device.num_members > 1), None)
    if group is not None:
        raise BapipeError(
            f"device '{group.name}' of the plan is a group of {group.num_members}, and bapipe does not split layers "
            "when it trains: plan again without profiles of groups, or train with an engine that does"
        )
