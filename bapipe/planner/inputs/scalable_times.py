"""Times of layers for lower bounds: a device of speed v takes at least 1/v of them.

A speed divides what a device works itself, and not what the members of a group exchange: on a device of speed v a layer
that takes t with the exchange e takes (t - e)/v + e, and not t/v.
"""

from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from bapipe.formats.cluster import Cluster
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile
from bapipe.units import decimal


def scalable_times(profile: ModelProfile, microbatch_size: int, cluster: Cluster) -> tuple[LayerMeasurement, ...]:
    """Returns the layers with times of which every device of the profile's kind takes at least 1/speed.

    With v the least speed, that is t - e + v e, because (t - e + v e)/w <= (t - e)/w + e for every speed w >= v. These
    are the profile's own times unless members exchange data and v is not 1. The exchange is not told apart any more.
    """
    measured = profile.at(microbatch_size)
    slowest = min((d.speed for d in cluster.devices if d.kind == profile.device.kind), default=1.0)
    if slowest == 1.0 or not any(m.exchange_ns for m in measured):
        return measured
    return tuple(_scalable(m, slowest) for m in measured)


def scales_exchange(profile: ModelProfile, cluster: Cluster) -> bool:
    """Returns whether a device has another speed than the profile, and members that exchange data."""
    is_other = any(d.kind == profile.device.kind and d.speed != 1.0 for d in cluster.devices)
    return is_other and any(layer.exchange_ns for of_size in profile.measurements for layer in of_size.layers)


def _scalable(measured: LayerMeasurement, slowest: float) -> LayerMeasurement:
    least, exchange = partial(_least_ns, slowest), measured.exchange
    backward_ns = measured.backward_ns
    return replace(
        measured,
        forward_ns=least(measured.forward_ns, exchange.forward_ns),
        input_grad_ns=least(measured.input_grad_ns, exchange.input_grad_ns),
        weight_grad_ns=least(measured.weight_grad_ns, exchange.weight_grad_ns),
        backward_ns=UNSET if backward_ns is UNSET else least(backward_ns, exchange.backward_ns),
        forward_exchange_ns=UNSET,
        backward_exchange_ns=UNSET,
    )


def _least_ns(slowest: float, total_ns: int, exchange_ns: int) -> int:
    return total_ns - exchange_ns + int(exchange_ns * decimal(slowest))
