"""The kind of devices that a plan is run on."""

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan


def device_kind(plan: Plan) -> str:
    """Returns the one kind of the devices that have a stage, `cpu` or `cuda`.

    Raises:
        BapipeError: they are of several kinds, or of one that torch cannot drive.
    """
    used = set(plan.used_devices)
    kinds = sorted({device.kind for device in plan.cluster.devices if device.name in used})
    if kinds not in (["cpu"], ["cuda"]):
        raise BapipeError(
            f"the plan's devices are of kind {', '.join(kinds)}; torch can run a plan of cpu or of cuda devices"
        )
    return kinds[0]
