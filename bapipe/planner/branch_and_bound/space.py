"""The search space of some options: a problem per schedule and micro-batch size, with its choices of devices."""

from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.errors import ConstraintsUnmet
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.branch_and_bound.partition_space import has_inseparable
from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.branch_and_bound.problem_builder import MAX_PERMUTED_DEVICES, ProblemBuilder
from bapipe.planner.branch_and_bound.roots import SOME_ORDERS, allow_any_order, num_in_any_order
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import num_layers
from bapipe.planner.inputs.validation import microbatch_sizes, named_schedules, names_looped
from bapipe.planner.results.searched_space import FASTEST_FIRST, INSEPARABLE, ONLY_FIRST, on_first_devices
from bapipe.planner.stages.constraints import check_constraints, parse_constraints
from bapipe.planner.stages.device_orders import device_orders
from bapipe.planner.stages.devices import (
    ClassLinks,
    DeviceClass,
    are_sorted,
    device_classes,
    ns_per_sample,
)
from bapipe.planner.stages.placements import num_stages_on
from bapipe.schedules import LOOPED
from bapipe.simulator.tied_weights import legal_cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The problems to solve, and their description for the certificate.

    Attributes:
        order: in which orders stages take devices, in words; '' if there is one device.
        stage_counts: the numbers of stages that devices, layers and schedules allow, ascending.
        device_counts: the numbers of devices that are tried, ascending.
    """

    problems: tuple[Problem, ...]
    order: str
    stage_counts: tuple[int, ...]
    device_counts: tuple[int, ...]


def search_space(
    profiles: ProfilesByKind,
    cluster: Cluster,
    options: PlanOptions,
    deadline: Deadline = UNLIMITED,
) -> SearchSpace:
    """Returns the search space of some options.

    Raises:
        BapipeError: a constraint names an unknown layer or device.
        ConstraintsUnmet: the constraints contradict one another, or the number of stages is impossible.
        OutOfTime: the deadline passed before the end.
    """
    check_num_stages(profiles, cluster, options)
    sizes = microbatch_sizes(profiles, cluster, options)
    return build_space(profiles, cluster, options, sizes=sizes, deadline=deadline)


def check_num_stages(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> None:
    """Checks, without a search, whether there are stages as the options want them, if memory is left aside.

    Raises:
        BapipeError: a constraint names an unknown layer or device, or no micro-batch size is possible.
        ConstraintsUnmet: the constraints contradict one another, or the number of stages is impossible.
    """
    first = next(iter(profiles.values()))
    constraints = parse_constraints(options.constraints)
    check_constraints(constraints, first, cluster)
    microbatch_sizes(profiles, cluster, options)  # raises the error if none is possible
    cuts = constraints.allowed_cuts(first, legal_cuts(first.layers))
    possible = _stage_counts(named_schedules(options), len(cluster.devices), len(cuts) - 1)
    if not possible or options.num_stages not in (None, *possible):
        together = f"; {INSEPARABLE}, and all between them, stay in one stage" if has_inseparable(profiles) else ""
        where = f" where {'; '.join(options.constraints)}" if options.constraints else ""
        asked = "any number of" if options.num_stages is None else options.num_stages
        raise ConstraintsUnmet(
            f"{asked} stages asked for; {len(cluster.devices)} devices, {num_layers(profiles)} layers and "
            f"{', '.join(named_schedules(options))} allow {', '.join(map(str, possible)) or 'none'}"
            f"{where}{together}"
        )


def build_space(
    profiles: ProfilesByKind,
    cluster: Cluster,
    options: PlanOptions,
    *,
    sizes: Sequence[int],
    deadline: Deadline = UNLIMITED,
) -> SearchSpace:
    """Returns the space at some micro-batch sizes. Placements and cost-to-go are computed when a search needs them.

    Args:
        sizes: micro-batch sizes that divide the mini-batch.
        deadline: after it, making the space, and later its tables, raises OutOfTime.
    """
    classes = _classes_of(profiles, cluster, options)
    orders = () if _allows_any_order(profiles, cluster, options, classes) else device_orders(profiles, cluster, options)
    class_of = {rank: c for c, cls in enumerate(classes) for rank in cls.ranks}
    builder = ProblemBuilder(
        profiles={cls.device.kind: profiles[cls.device.kind] for cls in classes},
        cluster=cluster,
        options=options,
        constraints=parse_constraints(options.constraints),
        classes=classes,
        links=ClassLinks(cluster, classes),
        lines=tuple(tuple(class_of[rank] for rank in order.ranks) for order in orders),
        deadline=deadline,
    )
    problems, intervals = builder.problems(sizes)
    max_stages = 0 if intervals is None else intervals.num_boundaries - 1
    return SearchSpace(
        problems=tuple(problems),
        order=_device_order_text([order.words for order in orders], cluster, classes, named_schedules(options)),
        stage_counts=_stage_counts(named_schedules(options), len(cluster.devices), max_stages),
        device_counts=tuple(sorted({root.num_devices for problem in problems for root in problem.roots})),
    )


def tries_any_order(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> bool:
    """Returns whether the space has devices in any order, or only in those of `device_orders`.

    This is about schedules with one stage per device. With several stages on each of many devices, the space has only
    some orders even if this is true; see `tries_all_orders`.
    """
    return _allows_any_order(profiles, cluster, options, _classes_of(profiles, cluster, options))


def tries_all_orders(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> bool:
    """Returns whether the space has all orders of the devices, for every schedule."""
    has_many = num_in_any_order(_classes_of(profiles, cluster, options)) < len(cluster.devices)
    has_some = has_many and names_looped(options)
    return not has_some and tries_any_order(profiles, cluster, options)


def _classes_of(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> tuple[DeviceClass, ...]:
    """Returns the classes of the cluster's devices under some options."""
    allowed = parse_constraints(options.constraints).allowed_layers(cluster)
    return device_classes(cluster, options.limits(cluster), allowed, ns_per_sample(profiles, cluster))


def has_sorted_devices(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> bool:
    """Returns whether the cluster lists its devices in the order of their classes; see `are_sorted`."""
    return are_sorted(_classes_of(profiles, cluster, options))


def _allows_any_order(
    profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions, classes: Sequence[DeviceClass]
) -> bool:
    """Returns whether the devices are few or alike enough to be taken in any order."""
    # A plan uses no more devices: a replica has at least one micro-batch, and a stage at least one layer.
    return allow_any_order(classes, min(len(cluster.devices), options.minibatch_size * num_layers(profiles)))


def _stage_counts(schedules: Sequence[str], num_devices: int, max_stages: int) -> tuple[int, ...]:
    """Returns the numbers of stages that are possible with any of some schedules, ascending."""
    # With one stage per device any number is possible; with several, the table fixes the number.
    device_counts = range(1, min(num_devices, max_stages) + 1)
    stage_counts = {num_stages_on(name, count) for name in dict.fromkeys(schedules) for count in device_counts}
    return tuple(sorted(count for count in stage_counts if count <= max_stages))


def _device_order_text(
    orders: Sequence[str], cluster: Cluster, classes: Sequence[DeviceClass], schedules: Sequence[str]
) -> str:
    """Returns in which orders stages take devices, in words that are part of certificates, and so of plan files.

    Args:
        orders: the words of the orders that are tried; () for any order.
    """
    if len(cluster.devices) == 1:
        return ""
    if orders:
        return on_first_devices(orders, are_sorted=are_sorted(classes))
    is_permuted = len(classes) == 1 or len(cluster.devices) <= MAX_PERMUTED_DEVICES
    num_in_all = num_in_any_order(classes)
    some = ""
    if num_in_all < len(cluster.devices) and any(schedule in LOOPED for schedule in schedules):
        some = f", with several stages on each of more than {num_in_all} devices {ONLY_FIRST} ones {SOME_ORDERS}"
    return f", in any order{'' if is_permuted else FASTEST_FIRST}{some}"
