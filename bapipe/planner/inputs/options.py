"""Options of planning: what a user fixes or allows, passed on to all searches.

A search that another one consists of gets a copy with what is asked of it (`dataclasses.replace`), as other schedules,
no replicas or a memory limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import msgspec

from bapipe.field_types import check_fields
from bapipe.formats.certificate import MemoryLimit
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Objective
from bapipe.planner.inputs.goal import Goal
from bapipe.schedules import ALL, SIDE_BY_SIDE
from bapipe.units import NonNegative, NonNegativeFloat, Positive, Share, decimal

RUNNABLE = tuple(name for name in ALL if name not in SIDE_BY_SIDE)
"""The schedules that torch can run."""

SEARCH = "search"
"""In place of the name of a schedule: the order of the actions is searched."""

EVERY_SCHEDULE = "all"
"""In place of the names in `RUNNABLE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a user fixes or allows, besides the profiles and the cluster.

    The command line shows most of these texts as the help of `bapipe plan`.

    Attributes:
        minibatch_size: number of samples per optimizer step, those of all replicas together.
        schedules: names in `bapipe.schedules`, or a single one; `all` is all that torch can run. With `search` among
            them, the order of the best plan with stages of one device each is then improved by a search that starts
            from the other named schedules (if there are none, from all with one stage per device). The result is never
            slower than the best plan with those, with replicas if they are allowed.
        num_stages: number of stages; by default it is searched.
        microbatch_size: number of samples of a micro-batch; by default it is searched.
        memory_limit_bytes: maximum number of bytes that any device may use, where it has more memory.
        memory_margin: share to leave free of what a device may use: its memory, or `memory_limit_bytes`.
        replicas: whether a stage may be replicated over several devices.
        recompute: whether stages that do not fit otherwise may recompute their forward.
        constraints: where layers are: 'LAYER with LAYER', 'LAYER without LAYER', or 'LAYER on DEVICE,DEVICE'.
        objective: minimize the time of one step, or the work of the most loaded device (throughput).
        time_limit_s: time limit of all searches together, in seconds; the plan then depends on how fast the machine is.
            By default searches do a fixed amount of work, and the same input gives the same plan; only after about a
            minute of computing (longer on a busy machine) do they end before.
        group: how many devices run a micro-batch together, of the profiles given: 1 for single devices; by default any.
        goal: the least memory or devices, or the largest model, in place of the shortest step; see `bapipe.Goal`.
        search_effort: how much work the search for an order does: about so many seconds of it.

    Raises:
        BapipeError: a value of another type, or out of range.
    """

    minibatch_size: Positive
    schedules: Sequence[str] = ("1f1b", "gpipe")
    num_stages: Positive | None = None
    microbatch_size: Positive | None = None
    memory_limit_bytes: NonNegative | None = None
    memory_margin: Share = 0.0
    replicas: bool = True
    recompute: bool = True
    constraints: Sequence[str] = ()
    objective: Objective = "step"
    time_limit_s: NonNegativeFloat | None = None
    search_effort: NonNegativeFloat = 10.0
    group: Positive | None = None
    goal: Goal | None = None

    def __post_init__(self) -> None:
        for name in ("schedules", "constraints"):  # of which a single one may be given as a text
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        check_fields(self)
        names = [name for one in self.schedules for name in (RUNNABLE if one == EVERY_SCHEDULE else (one,))]
        object.__setattr__(self, "schedules", tuple(dict.fromkeys(names)))

    def limits(self, cluster: Cluster) -> list[int]:
        """Returns the bytes that each device may hold."""
        limit = self.memory
        return [limit.usable_bytes(device.memory_bytes) for device in cluster.devices]

    @property
    def memory(self) -> MemoryLimit:
        """What is given of `memory_limit_bytes` and `memory_margin`."""
        given = msgspec.UNSET if self.memory_limit_bytes is None else self.memory_limit_bytes
        return MemoryLimit(bytes_per_device=given, margin=self.memory_margin)


def limit_that_leaves(num_bytes: int, margin: float) -> int:
    """Returns the largest memory of which this many bytes may be used, as `PlanOptions.limits` counts them."""
    return ceil((num_bytes + 1) / (1 - decimal(margin))) - 1  # a byte more would leave another one
