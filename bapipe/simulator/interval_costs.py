"""The costs of many intervals of layers at once: the vectorised forms of the simulator's rules, in numpy.

Searches look at every interval [begin, end) between two boundaries. What is summed over layers is the difference of two
prefix sums, so one subtraction of arrays gives all intervals. Each form names the scalar rule that it equals;
tests/simulator/test_interval_costs.py holds the pairs equal. The rest of the simulator does not import this file, which
keeps numpy out of `import bapipe`.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from bapipe.formats.cluster import Bandwidth
from bapipe.formats.profile import ModelProfile
from bapipe.simulator.layer_totals import NO_HOST_TIMES
from bapipe.units import decimal

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Index = Any
"""One boundary, or an array of boundaries of any shape."""

MAX_NS = 1 << 60
"""Times beyond this are cut down to it, so that the sum of two of them still has 63 bits."""


def prefix_sums(values: Sequence[int] | IntArray) -> IntArray:
    """Returns 0, values[0], values[0] + values[1], ... [n] -> [n + 1]"""
    return np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])


def transfer_ns(num_bytes: IntArray, link: Bandwidth, max_ns: int = MAX_NS) -> IntArray:
    """Returns the time of a transfer of each size, at most `max_ns`; no bytes take no time.

    The vectorised form of `Bandwidth.transfer_ns`. Bytes times 10**9 may overflow 64 bits from 2**32 bytes on; such
    sizes are computed with Python's integers.
    """
    exact = num_bytes if np.abs(num_bytes).max(initial=0) < 2**32 else num_bytes.astype(object)
    times_ns = np.minimum(link.latency_ns - (-exact * 1_000_000_000 // link.bytes_per_s), max_ns)
    found: IntArray = np.where(num_bytes > 0, times_ns, 0).astype(np.int64)
    return found


def ring_ns(
    num_bytes: IntArray, num_devices: int | IntArray, links: Iterable[Bandwidth], max_ns: int = MAX_NS
) -> IntArray:
    """Returns the time of ring all-reduces over devices joined by `links`; nothing for one device or no bytes.

    The vectorised form of `bapipe.simulator.allreduce.ring_ns`: 2 (r - 1) messages of a r-th of the bytes over the
    slowest link. If the devices sum with their own compute, `links` contains that as a link.
    """
    message_bytes = -(-num_bytes // num_devices)
    slowest_ns = np.maximum.reduce([transfer_ns(message_bytes, link, max_ns) for link in links])
    found: IntArray = 2 * (num_devices - 1) * slowest_ns
    return found


def at_speed(times_ns: IntArray, speed: float, max_ns: int = MAX_NS) -> IntArray:
    """Returns each time divided by the speed, rounded half up, exactly; at most `max_ns`.

    The vectorised form of `bapipe.units.at_speed`.
    """
    if speed == 1.0:
        return times_ns
    up, down = decimal(speed).as_integer_ratio()
    fits = int(np.abs(times_ns).max(initial=0)) * 2 * down + up < 1 << 62
    exact = times_ns if fits else np.asarray(times_ns).astype(object)
    found: IntArray = np.asarray(np.minimum((2 * exact * down + up) // (2 * up), max_ns), dtype=np.int64)
    return found


def cut_bytes(profile: ModelProfile, microbatch_size: int, inside: IntArray | None = None) -> tuple[IntArray, IntArray]:
    """Returns the bytes of activations and of gradients that cross each boundary, [boundaries] each.

    Boundaries are those of `IntervalCosts`. The vectorised form of `bapipe.simulator.cuts.find_cuts`.
    """
    num_boundaries = len(profile.layers) + 1 if inside is None else len(inside)
    send, grad = (np.zeros(num_boundaries, dtype=np.int64) for _ in range(2))
    measured = profile.at(microbatch_size)
    for i, output, crosses in _crossings(profile, inside):
        num_bytes = measured[i].output_bytes[output]
        send[crosses] += num_bytes
        grad[crosses] += 0 if profile.layers[i].outputs[output] in profile.layers[i].no_gradient else num_bytes
    return send, grad


def gradient_crosses(profile: ModelProfile, inside: IntArray | None = None) -> BoolArray:
    """Returns whether a tensor with a gradient crosses each boundary. [boundaries]

    A stage that begins at one where none does sends no gradient back. The vectorised form of `num_gradients` of
    `bapipe.simulator.cuts.find_cuts`.
    """
    found = np.zeros(len(profile.layers) + 1 if inside is None else len(inside), dtype=bool)
    for i, output, crosses in _crossings(profile, inside):
        if profile.layers[i].outputs[output] not in profile.layers[i].no_gradient:
            found[crosses] = True
    return found


def _crossings(profile: ModelProfile, inside: IntArray | None) -> Iterator[tuple[int, int, Any]]:
    """Yields each output of each layer, by numbers, with the boundaries that it crosses.

    A tensor crosses a boundary if it is made before it and a layer behind it uses it.
    """
    users: dict[str, list[int]] = {}
    for i, layer in enumerate(profile.layers):
        for tensor in layer.inputs:
            users.setdefault(tensor, []).append(i)
    for i, layer in enumerate(profile.layers):
        for output, tensor in enumerate(layer.outputs):
            if tensor not in users:
                continue
            crosses: Any = slice(i + 1, max(users[tensor]) + 1)
            if inside is not None:
                crosses = (inside[:, i] == 1) & (inside[:, users[tensor]].min(axis=1) == 0)
            yield i, output, crosses


class _TimeSums(NamedTuple):
    """Sums of times over the layers before each boundary. [boundaries]

    Attributes:
        own: what the device works itself, which its speed divides.
        exchange: what the members of a group exchange besides; None if nothing.
    """

    own: IntArray
    exchange: IntArray | None


class IntervalCosts:
    """The costs of the layers between any two boundaries, at one micro-batch size, on devices of one kind and speed.

    The vectorised form of `bapipe.simulator.stage_cost.cost_of_totals`, without recomputation and without the copies of
    tied weights. Methods take `begin` and `end` as boundaries or arrays of them, and return what these broadcast to.

    Boundary b of a chain has the first b layers before it. Boundaries of other graphs are given by `inside`: 1 if a
    layer lies before a boundary; [boundaries, layers].

    Args:
        max_ns: times on devices of a speed other than 1 are cut down to this.
    """

    def __init__(
        self,
        profile: ModelProfile,
        microbatch_size: int,
        speed: float,
        *,
        inside: IntArray | None = None,
        max_ns: int = MAX_NS,
    ) -> None:
        def sums(values: Sequence[int]) -> IntArray:  # over the layers before each boundary; [boundaries]
            return prefix_sums(values) if inside is None else inside @ np.array(values, dtype=np.int64)

        def times(total_ns: Sequence[int], exchange_ns: Sequence[int] = ()) -> _TimeSums:
            if not any(exchange_ns):
                return _TimeSums(sums(total_ns), None)
            own_ns = [total - exchanged for total, exchanged in zip(total_ns, exchange_ns, strict=True)]
            return _TimeSums(sums(own_ns), sums(exchange_ns))

        self._profile, self._inside = profile, inside
        measured, layers = profile.at(microbatch_size), profile.layers
        exchange = [m.exchange for m in measured]
        self._forward = times([m.forward_ns for m in measured], [e.forward_ns for e in exchange])
        self._input_grad = times([m.input_grad_ns for m in measured], [e.input_grad_ns for e in exchange])
        self._weight_grad = times([m.weight_grad_ns for m in measured], [e.weight_grad_ns for e in exchange])
        self._backward = times([m.whole_backward_ns for m in measured], [e.backward_ns for e in exchange])
        self._num_with_backward = sums([m.backward_ns is not UNSET for m in measured])
        self._update = times([layer.update_ns for layer in layers])
        self._params = sums([layer.param_bytes for layer in layers])
        self._gradients = sums([layer.gradient_bytes for layer in layers])
        self._group_gradients = sums([layer.group_gradient_bytes for layer in layers])
        self._optimizer = sums([layer.optimizer_state_bytes for layer in layers])
        self._stash = sums([m.stash_bytes for m in measured])
        self._gradient_stash = sums([m.left_by_input_grad_bytes for m in measured])
        self._max_ns, self._counts_exchange = max_ns, True
        host = [m.host or NO_HOST_TIMES for m in measured]
        self._has_host_times = any(m.host is not UNSET for m in measured)
        self._host_forward = sums([h.forward_ns for h in host])
        self._host_input_grad = sums([h.input_grad_ns for h in host])
        self._host_weight_grad = sums([h.weight_grad_ns for h in host])
        self._host_backward = sums([h.backward_ns for h in host])
        own_times = self._forward, self._input_grad, self._weight_grad, self._backward, self._update
        self._longest = max(int(of_layers.own.max()) for of_layers in own_times)
        self._set_speed(speed)

    def _set_speed(self, speed: float) -> None:
        self.speed = speed
        self._up, self._down = up, down = decimal(speed).as_integer_ratio()
        # No interval takes longer than all layers: if these need no more than 63 bits, no interval has to be checked.
        self._is_exact = self._longest * 2 * down + up < 1 << 62 and self._longest * down // up < self._max_ns

    def at_speed(self, speed: float) -> "IntervalCosts":
        """Returns the costs on devices of another speed."""
        other = copy(self)
        other._set_speed(speed)
        return other

    @property
    def has_host_times(self) -> bool:
        """Whether the host's times count."""
        return self._has_host_times

    def without_host_times(self) -> "IntervalCosts":
        """Returns the costs without the host's times: no action takes less."""
        other = copy(self)
        other._has_host_times = False
        return other

    def own_work(self) -> "IntervalCosts":
        """Returns the costs of what devices work themselves, which the speed divides: without host and exchange."""
        other = self.without_host_times()
        other._counts_exchange = False
        return other

    def forward_ns(self, begin: Index, end: Index) -> IntArray:
        """Returns F of one micro-batch."""
        return self._action_ns(self._ns(self._forward, begin, end), self._host_forward, begin, end)

    def input_grad_ns(self, begin: Index, end: Index) -> IntArray:
        """Returns I of one micro-batch: nothing, if the stage sends no gradient back."""
        found: IntArray = np.where(self._sends_gradient[begin], self.input_grad_if_sent_ns(begin, end), 0)
        return found

    def input_grad_if_sent_ns(self, begin: Index, end: Index) -> IntArray:
        """Returns I of layers if their stage sends a gradient back."""
        return self._action_ns(self._ns(self._input_grad, begin, end), self._host_input_grad, begin, end)

    def weight_grad_ns(self, begin: Index, end: Index) -> IntArray:
        """Returns W of one micro-batch: all of B, if the stage sends no gradient back."""
        apart = self.weight_grad_after_input_grad_ns(begin, end)
        found: IntArray = np.where(self._sends_gradient[begin], apart, self.backward_ns(begin, end))
        return found

    def weight_grad_after_input_grad_ns(self, begin: Index, end: Index) -> IntArray:
        """Returns W of layers of a stage that sends a gradient back; they may be any last layers of that stage."""
        return self._action_ns(self._ns(self._weight_grad, begin, end), self._host_weight_grad, begin, end)

    def backward_ns(self, begin: Index, end: Index) -> IntArray:
        """Returns B of one micro-batch: I + W, each rounded, unless B was measured of some layer."""
        return self._action_ns(self._device_backward_ns(begin, end), self._host_backward, begin, end)

    def _device_backward_ns(self, begin: Index, end: Index) -> IntArray:
        backward = self._ns(self._backward, begin, end)
        if self.speed == 1.0:  # nothing is rounded, so the layers' B add up to I + W as well
            return backward
        split = self._ns(self._input_grad, begin, end) + self._ns(self._weight_grad, begin, end)
        measured = self._num_with_backward[end] > self._num_with_backward[begin]
        found: IntArray = np.where(measured, backward, split)
        return found

    def update_ns(self, begin: Index, end: Index) -> IntArray:
        """Returns the optimizer's update."""
        return self._ns(self._update, begin, end)

    def param_bytes(self, begin: Index, end: Index) -> IntArray:
        """Returns the bytes of the parameters."""
        return self._difference(self._params, begin, end)

    def gradient_bytes(self, begin: Index, end: Index) -> IntArray:
        """Returns the bytes of the gradients: of those parameters that are trained."""
        return self._difference(self._gradients, begin, end)

    def group_gradient_bytes(self, begin: Index, end: Index) -> IntArray:
        """Returns the bytes of the gradients that the members of a group sum."""
        return self._difference(self._group_gradients, begin, end)

    def optimizer_bytes(self, begin: Index, end: Index) -> IntArray:
        """Returns the bytes of the optimizer's state."""
        return self._difference(self._optimizer, begin, end)

    def stash_bytes(self, begin: Index, end: Index) -> IntArray:
        """Returns the bytes of the stash of one micro-batch."""
        return self._difference(self._stash, begin, end)

    def gradient_stash_bytes(self, begin: Index, end: Index) -> IntArray:
        """Returns the bytes that I leaves for W of one micro-batch: none, if the stage sends no gradient back."""
        left = self._difference(self._gradient_stash, begin, end)
        found: IntArray = np.where(self._sends_gradient[begin], left, 0)
        return found

    @cached_property
    def _sends_gradient(self) -> BoolArray:
        """Whether a stage that begins at each boundary sends a gradient back. [boundaries]"""
        return gradient_crosses(self._profile, self._inside)

    def _action_ns(self, device_ns: IntArray, host_sums: IntArray, begin: Index, end: Index) -> IntArray:
        """The longer of what the device needs and what the host needs."""
        if not self._has_host_times:
            return device_ns
        longer: IntArray = np.maximum(device_ns, self._difference(host_sums, begin, end))
        return longer

    def _difference(self, sums: IntArray, begin: Index, end: Index) -> IntArray:
        found: IntArray = sums[end] - sums[begin]
        return found

    def _ns(self, times: _TimeSums, begin: Index, end: Index) -> IntArray:
        own_ns = self._at_speed(self._difference(times.own, begin, end))
        if times.exchange is None or not self._counts_exchange:
            return own_ns
        return own_ns + self._difference(times.exchange, begin, end)

    def _at_speed(self, times_ns: IntArray) -> IntArray:
        if self.speed == 1.0:
            return times_ns
        if not self._is_exact:
            return at_speed(times_ns, self.speed, self._max_ns)
        return (2 * times_ns * self._down + self._up) // (2 * self._up)
