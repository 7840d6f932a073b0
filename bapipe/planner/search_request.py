"""What every search for a plan is given: the inputs, how long it may take, and whom it tells."""

from dataclasses import dataclass

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import num_layers
from bapipe.planner.inputs.validation import microbatch_sizes, named_schedules
from bapipe.planner.results.solution import Rival
from bapipe.planner.results.work_bound import step_bound_ns
from bapipe.progress import SearchProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """The inputs of a search for one cluster and one order of the layers, and the limits of the search.

    A search that consists of several others hands each of them a copy with other fields (`dataclasses.replace`).

    Attributes:
        profiles: one for each kind of device in the cluster; their layers are in the order that is to be cut.
        cluster: `Cluster.sequential`: no device runs a forward and a backward side by side.
        deadline: ends the search with the best solution so far.
        progress: called with (plans simulated, best step time, lower bound).
        rival: the best plan for another grouping of the devices. A search for many devices ends as soon as it is clear
            that it cannot do better.
        orders_for: the options under whose memory limits further orders of the layers are proposed; if empty, `options`
            alone. All searches of a goal must have the same orders, and each has a memory limit of its own.
    """

    profiles: ProfilesByKind
    cluster: Cluster
    options: PlanOptions
    deadline: Deadline = UNLIMITED
    progress: SearchProgress | None = None
    rival: Rival | None = None
    orders_for: tuple[PlanOptions, ...] = ()

    @property
    def inputs(self) -> tuple[ProfilesByKind, Cluster, PlanOptions]:
        return self.profiles, self.cluster, self.options

    @property
    def num_layers(self) -> int:
        return num_layers(self.profiles)

    @property
    def schedules(self) -> list[str]:
        """The names of the schedules to plan with, without `search`."""
        return named_schedules(self.options)

    @property
    def microbatch_sizes(self) -> list[int]:
        """The micro-batch sizes to search, ascending; raises BapipeError if no size is possible."""
        return microbatch_sizes(*self.inputs)

    @property
    def step_bound_ns(self) -> int:
        """A time that no step of any plan can beat; it needs no search."""
        return step_bound_ns(*self.inputs)
