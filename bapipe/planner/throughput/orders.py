"""The orders of unlike devices in which plans for throughput are searched."""

from collections.abc import Iterator, Sequence
from math import factorial, prod

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.results.searched_space import ANY_ORDER, GIVEN_ORDER
from bapipe.planner.stages.device_orders import DeviceOrder, device_orders
from bapipe.planner.stages.devices import device_classes, ns_per_sample
from bapipe.planner.throughput.heterogeneous import MAX_DEVICES_WITH_GAPS
from bapipe.planner.throughput.load_search import is_homogeneous

MAX_ORDERS = 24
"""So many orders are searched at most: all of four devices of which no two are alike."""


def given_order(cluster: Cluster) -> DeviceOrder:
    """Returns the order in which a cluster lists its devices."""
    return DeviceOrder(words=GIVEN_ORDER, ranks=tuple(range(len(cluster.devices))))


def orders_to_search(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> tuple[DeviceOrder, ...]:
    """Returns the orders in which stages take the devices, the cluster's first: all that differ, or of many some.

    Alike devices have one order. Where all orders are searched, a plan that leaves out devices is found with these
    before its first stage, so that no stage holds micro-batches for devices behind it that have none.
    """
    given = given_order(cluster)
    if is_homogeneous(cluster, options.limits(cluster)):
        return (given,)
    class_of = _class_of(profiles, cluster, options)
    has_all = searches_all_orders(profiles, cluster, options)
    orders = [given, *device_orders(profiles, cluster, options)]
    if has_all:
        # Those that are likely to have good plans come first: then the others need only be refuted.
        every = [*orders, *(DeviceOrder(words=ANY_ORDER, ranks=ranks) for ranks in _arrangements(class_of))]
        orders = [DeviceOrder(words=ANY_ORDER, ranks=order.ranks) for order in every]
    # Orders that exchange alike devices have plans of equal loads.
    distinct = {tuple(class_of[rank] for rank in order.ranks): order for order in reversed(orders)}
    return tuple(sorted(distinct.values(), key=orders.index))


def searches_all_orders(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> bool:
    """Returns whether plans may take devices in any order: these are alike, or differ in few orders."""
    if is_homogeneous(cluster, options.limits(cluster)):
        return True
    if len(cluster.devices) > MAX_DEVICES_WITH_GAPS:
        return False
    # The multinomial coefficient: orders of n devices, of which those within a class are exchanged for nothing.
    class_of = _class_of(profiles, cluster, options)
    num_alike = prod(factorial(class_of.count(number)) for number in set(class_of))
    return factorial(len(class_of)) // num_alike <= MAX_ORDERS


def _class_of(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> tuple[int, ...]:
    """Returns for each rank the number of its class of alike devices."""
    limits, times_ns = options.limits(cluster), ns_per_sample(profiles, cluster)
    classes = device_classes(cluster, limits, [None] * len(limits), times_ns)
    number_of = {rank: number for number, of_class in enumerate(classes) for rank in of_class.ranks}
    return tuple(number_of[rank] for rank in range(len(limits)))


def _arrangements(class_of: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields one order of the ranks for each order of their classes."""

    def after(ranks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        left = [rank for rank in range(len(class_of)) if rank not in ranks]
        if not left:
            yield ranks
        for rank in {class_of[rank]: rank for rank in reversed(left)}.values():  # the first one of each class
            yield from after((*ranks, rank))

    return after(())
