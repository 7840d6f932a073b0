"""Which of several plans is preferred, wherever whole plans are compared."""

from typing import NamedTuple


class Preference(NamedTuple):
    """The sort key of plans: the least objective is best, then the least memory, then the fewest devices, then the
    fewest stages.

    Of plans that are equal in all four, the first one found is kept.

    Attributes:
        objective_ns: the step time, or the largest load of a device.
        peak_bytes: the largest peak memory of a device.
        num_devices: those that have a stage.
        num_stages: of which a device may have several.
    """

    objective_ns: int
    peak_bytes: int
    num_devices: int
    num_stages: int
