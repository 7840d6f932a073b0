"""The space that a search covered, as records; and the one function that describes a record in a certificate.

What is proven of a space follows from its record. Of a plan read from a file only the words are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Union

import msgspec

from bapipe.formats.certificate import Certificate, MemoryLimit
from bapipe.schedules import LOOPED

GIVEN_ORDER = "in the cluster's order"
"""How plans take devices where orders are too many to try all."""

ANY_ORDER = "in any order"
"""How plans take devices where all orders are tried."""

ONLY_FIRST = "only the first"
"""Where not every choice of devices is tried."""

ORDERS_OF_STAGES = "every order of F, B, I and W for these stages"
"""What the space of a searched order begins with: it is about the stages and micro-batches of one plan."""


MOST_AT_CUTS = "of stages that fit with the most bytes that any kind of device has at their cuts"
IF_ALL_LATER = "of stages that fit if all later devices have stages, too"
"""Which plans a space leaves out although they fit: their stages are counted with more bytes than they may need."""


def is_of_stages(certificate: Certificate) -> bool:
    """Returns whether the space of a plan from a file, or a part of it, is about the stages of one plan."""
    return ORDERS_OF_STAGES in certificate.space


FASTEST_FIRST = ", those of one stage in one order, the fastest first"
"""How the devices of a stage take micro-batches where their orders are too many to try all: `device_classes`."""


INSEPARABLE = "layers that share parameters of unknown size, or a buffer that training may change"
"""Between which no stage may end: `inseparable_layers`."""


WITH_MICROBATCH = ", each with a micro-batch"
"""Which replicas a stage may have: one without a micro-batch would only take part in sums, and runs refuse it."""


ALL_MEMORY = MemoryLimit()
"""Where plans may use all of each device's memory."""


def on_first_devices(orders: Sequence[str], *, are_sorted: bool) -> str:
    """Returns which devices plans take in some orders, given in words; they are part of plan files.

    Args:
        are_sorted: whether the cluster's devices are in the order in which stages take theirs.
    """
    in_stage = "" if are_sorted and set(orders) == {GIVEN_ORDER} else FASTEST_FIRST
    return f", {', or '.join(orders)}{in_stage}, of too many choices {ONLY_FIRST} devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSpace:
    """Partitions of the layers, in one order, into the stages of schedules.

    Attributes:
        stage_counts, device_counts: the smallest and the largest number.
        device_order: how devices are assigned to stages, in words.
        microbatch_sizes: ascending.
        constraints: as the user wrote them.
        memory: what plans may use of each device's memory.
        has_unlike_cuts: whether kinds of devices disagree about the bytes at a cut, of which stages then have the most.
        has_inseparable: whether there are layers that no cut may part.
    """

    num_layers: int
    num_devices: int
    stage_counts: tuple[int, int]
    device_counts: tuple[int, int]
    device_order: str
    microbatch_sizes: tuple[int, ...]
    schedules: tuple[str, ...]
    replicas: bool
    recompute: bool
    constraints: tuple[str, ...]
    memory: MemoryLimit = ALL_MEMORY
    has_unlike_cuts: bool = False
    has_inseparable: bool = False

    @property
    def has_any_order(self) -> bool:
        """Whether stages may be on any devices in any order, and not only on the first ones of some orders."""
        return ONLY_FIRST not in self.device_order


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOrderSpace:
    """The orders of actions of the stages of the best plan for a named schedule, or of neighbouring stages.

    Attributes:
        has_same_stages: whether the stages are those of the best plan found for the named schedule.
        num_other_partitions: how many neighbouring partitions were searched too.
        named_bound_ns: no plan with a named schedule has a shorter step, with replicas if they are allowed.
    """

    schedule: str
    has_same_stages: bool
    num_other_partitions: int
    named_bound_ns: int
    stages_from: "SearchedSpace"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearizationsSpace:
    """The same space along several orders of the layers."""

    num_orders: int
    along_each: "SearchedSpace"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSpace:
    """Cuts of the layer graph at downsets, each stage on a number of devices.

    Attributes:
        num_downsets: how many downsets the graph has, None if there are more than `max_downsets`.
        has_all_device_counts: whether a stage may have any number of devices, or powers of two only.
        has_gaps: whether devices between those of two stages may stay unused.
        counts_later: whether stages hold as many micro-batches as if all later devices had stages.
        orders: in which orders stages take devices, in words.
        is_fastest_first: whether the replicas of a stage are not in the cluster's order.
        keeps_tied: whether there are layers that share parameters, which stay in one stage, with all between them.
        memory: what plans may use of each device's memory.
    """

    num_layers: int
    num_devices: int
    num_downsets: int | None
    max_downsets: int
    has_all_device_counts: bool
    has_gaps: bool
    counts_later: bool
    is_fastest_first: bool
    keeps_tied: bool
    microbatch_sizes: tuple[int, ...]
    orders: tuple[str, ...] = (GIVEN_ORDER,)
    memory: MemoryLimit = ALL_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoSpace:
    """Plans for a number of devices under a memory limit, of those that `all_counts` has for all numbers."""

    num_devices: int
    limit_bytes: int
    all_counts: PartitionSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingsSpace:
    """Several groupings of the devices, of which `of_best` is the space of the best plan's."""

    names: tuple[str, ...]
    of_best: "SearchedSpace"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenDevicesSpace:
    """Choices of some of the devices, of which `of_best` is the space with those of the best plan.

    Attributes:
        num_choices: how many choices differ; None if there are too many to try all.
        left_out: which plans the space of any choice leaves out although they fit, in words; see `left_out`.
    """

    num_chosen: int
    num_devices: int
    num_choices: int | None
    left_out: tuple[str, ...]
    of_best: "SearchedSpace"


SearchedSpace = Union[  # noqa: UP007
    PartitionSpace,
    ActionOrderSpace,
    LinearizationsSpace,
    ThroughputSpace,
    ParetoSpace,
    GroupingsSpace,
    ChosenDevicesSpace,
]


def in_words(space: SearchedSpace) -> str:
    """Returns the space as a certificate states it. The texts are part of plan files: they must not change."""
    match space:
        case PartitionSpace():
            return _partitions(space)
        case ThroughputSpace():
            return _throughput(space)
        case ActionOrderSpace():
            made = "the stages were made, a layer at a time, from equally long ones or from"
            origin = "the stages are" if space.has_same_stages else made
            return (
                f"{ORDERS_OF_STAGES}; {origin} the best found for {space.schedule}, chosen from "
                f"{in_words(space.stages_from)}; orders were searched for {space.num_other_partitions} other cuts too"
            )
        case LinearizationsSpace():
            return (
                f"{space.num_orders} orders of the layers, the profile's and those of the best cuts of their graph, in "
                f"which the bound has the layers of each stage; along each: {in_words(space.along_each)}"
            )
        case GroupingsSpace():
            return (
                f"the devices seen as {', or as '.join(space.names)}; with those of the plan: {in_words(space.of_best)}"
            )
        case ParetoSpace():
            return (
                f"{_count((space.num_devices,) * 2, 'device')}, {space.limit_bytes:,} bytes each, of the plans of "
                f"{in_words(space.all_counts)}"
            )
        case ChosenDevicesSpace():
            chosen = f"{space.num_chosen} of {space.num_devices} devices"
            which = (
                f"each choice of {chosen}, of which {space.num_choices} differ"
                if space.num_choices
                else f"of too many choices of {chosen} only the fastest and those of the plan"
            )
            of_others = [f", {words}" for words in space.left_out if words not in left_out(space.of_best)]
            return f"{which}{''.join(of_others)}; with those of the plan: {in_words(space.of_best)}"


def is_of_action_orders(space: SearchedSpace) -> bool:
    """Returns whether a space is about the orders of actions of some stages."""
    match space:
        case LinearizationsSpace():
            return is_of_action_orders(space.along_each)
        case GroupingsSpace() | ChosenDevicesSpace():
            return is_of_action_orders(space.of_best)
        case _:
            return isinstance(space, ActionOrderSpace)


def left_out(space: SearchedSpace) -> tuple[str, ...]:
    """Returns which plans a space leaves out although they fit, in words: what is proven does not hold for these."""
    match space:
        case PartitionSpace():
            return (MOST_AT_CUTS,) if space.has_unlike_cuts else ()
        case ThroughputSpace():
            return (IF_ALL_LATER,) if space.counts_later else ()
        case ActionOrderSpace():
            return left_out(space.stages_from)
        case LinearizationsSpace():
            return left_out(space.along_each)
        case GroupingsSpace():
            return left_out(space.of_best)
        case ParetoSpace():
            return left_out(space.all_counts)
        case ChosenDevicesSpace():
            return space.left_out


def memory_limit(space: SearchedSpace) -> MemoryLimit | msgspec.UnsetType:
    """Returns the limit that the plans of a space keep to, if there is one."""
    match space:
        case PartitionSpace() | ThroughputSpace():
            return msgspec.UNSET if space.memory == ALL_MEMORY else space.memory
        case ActionOrderSpace():
            return memory_limit(space.stages_from)
        case LinearizationsSpace():
            return memory_limit(space.along_each)
        case GroupingsSpace() | ChosenDevicesSpace():
            return memory_limit(space.of_best)
        case ParetoSpace():
            return MemoryLimit(bytes_per_device=space.limit_bytes)


def without_memory_limit(space: SearchedSpace) -> SearchedSpace:
    """Returns the same space, but for plans that may use all of each device's memory."""
    match space:
        case PartitionSpace() | ThroughputSpace():
            return replace(space, memory=ALL_MEMORY)
        case ActionOrderSpace():
            return replace(space, stages_from=without_memory_limit(space.stages_from))
        case LinearizationsSpace():
            return replace(space, along_each=without_memory_limit(space.along_each))
        case GroupingsSpace() | ChosenDevicesSpace():
            return replace(space, of_best=without_memory_limit(space.of_best))
        case ParetoSpace():
            return space  # which is that of a limit


def _partitions(space: PartitionSpace) -> str:
    sizes = ", ".join(map(str, space.microbatch_sizes))
    constraints = f"; where {'; '.join(space.constraints)}" if space.constraints else ""
    cuts = f"; {MOST_AT_CUTS}"
    together = f"with {INSEPARABLE}, and all between them, in one stage, "
    return (
        f"every cut of {space.num_layers} layers, in the profile's order, "
        f"{together if space.has_inseparable else ''}into "
        f"{_count(space.stage_counts, 'stage')} on {_count(space.device_counts, 'device')} of "
        f"{space.num_devices}{space.device_order}; micro-batches of {sizes}; "
        f"schedules {', '.join(space.schedules)}; {_replicas(space)}, "
        f"{_recomputation(space)}{_memory(space.memory)}{cuts if space.has_unlike_cuts else ''}{constraints}"
    )


def _memory(limit: MemoryLimit) -> str:
    return f"; {limit.in_words}" if limit.in_words else ""


def _replicas(space: PartitionSpace) -> str:
    return f"any replicas{WITH_MICROBATCH}" if space.replicas else "no replicas"


def _recomputation(space: PartitionSpace) -> str:
    if not space.recompute:
        return "no recomputation"
    if any(name in LOOPED for name in space.schedules):
        return "recomputation where the stages of a device do not fit without"
    return "recomputation where a stage does not fit without"


def _throughput(space: ThroughputSpace) -> str:
    cuts = (
        f"cuts along 3 orders and near the best, of more than {space.max_downsets} downsets (the bound holds for all),"
        if space.num_downsets is None
        else f"all cuts, at {space.num_downsets} downsets,"
    )
    tied = ", those that share parameters, and all between them, in one stage" if space.keeps_tied else ""
    counts = "any number" if space.has_all_device_counts else "1, 2, 4, 8 and so on"
    held = f"; {IF_ALL_LATER}" if space.counts_later else ""
    in_stage = FASTEST_FIRST if space.is_fastest_first else ""
    return (
        f"the largest load of a device, or the step of one stage if that is shorter, for {cuts} of {space.num_layers} "
        f"layers{tied}; {counts} of {space.num_devices} devices for a stage{WITH_MICROBATCH}, "
        f"{_order_of_devices(space)}{in_stage}; micro-batches of "
        f"{', '.join(map(str, space.microbatch_sizes))}; no recomputation{_memory(space.memory)}{held}"
        f"{_as_one_stage(space)}"
    )


def _order_of_devices(space: ThroughputSpace) -> str:
    if set(space.orders) == {ANY_ORDER}:
        return ANY_ORDER
    return f"next to one another {', or '.join(space.orders)}{'' if space.has_gaps else ', without gaps'}"


def _as_one_stage(space: ThroughputSpace) -> str:
    """Returns the naive plans, where they are no points of the rest of the space."""
    if space.has_all_device_counts and space.has_gaps:
        return ""
    return "; or all layers on one device, or on any number of the first ones" + WITH_MICROBATCH


def partitions_in(space: SearchedSpace) -> PartitionSpace:
    """Returns the partitions of a search along one order of the layers, with or without a search of action orders."""
    partitions = space.stages_from if isinstance(space, ActionOrderSpace) else space
    assert isinstance(partitions, PartitionSpace)
    return partitions


def _count(range_of_counts: tuple[int, int], noun: str) -> str:
    low, high = range_of_counts
    return f"{low} {noun}{'s' if low > 1 else ''}" if low == high else f"{low} to {high} {noun}s"
