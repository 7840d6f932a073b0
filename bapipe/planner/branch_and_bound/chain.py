"""The layers as a chain on one kind of device: the simulator's cost of any interval of layers by prefix sums.

Costs one interval at a time, in Python's integers, exactly as `bapipe.simulator.stage_cost` does from layers (a test
holds them equal). `intervals.py` has the costs of all intervals at once.
"""

from collections.abc import Sequence

from msgspec import UNSET

from bapipe.formats.profile import ModelProfile
from bapipe.simulator.interval_costs import cut_bytes
from bapipe.simulator.stage_cost import Stage, StageCost, fill_buckets
from bapipe.simulator.tied_weights import TiedWeightCost, TiedWeights, inseparable_layers
from bapipe.units import at_speed


class Chain:
    """A profile at one micro-batch size, in the profile's layer order, on devices of one speed.

    Attributes:
        send_bytes, grad_bytes: activations and gradients of a micro-batch that cross the cut before each layer.
            [layers + 1]
        legal: whether the chain may be cut there; layers that share parameters of unknown size stay together.
            [layers + 1]
    """

    def __init__(self, profile: ModelProfile, microbatch_size: int, speed: float) -> None:
        measured = profile.at(microbatch_size)
        self.num_layers, self.profile_name = len(measured), profile.device.kind
        self._speed = speed
        # Prefix sums over layers. [layers + 1]
        self._forward = _sums([m.forward_ns for m in measured])
        self._input_grad = _sums([m.input_grad_ns for m in measured])
        self._weight_grad = _sums([m.weight_grad_ns for m in measured])
        self._backward = _sums([m.whole_backward_ns for m in measured])
        # A count: zero in an interval without any measured B, whose B is I + W then.
        self._num_measured_backward = _sums([m.backward_ns is not UNSET for m in measured])
        self._gradient_stash = _sums([m.left_by_input_grad_bytes for m in measured])
        self._stash = _sums([m.stash_bytes for m in measured])
        self._workspace = [m.workspace_bytes for m in measured]
        self._update = _sums([layer.update_ns for layer in profile.layers])
        self._params = _sums([layer.param_bytes for layer in profile.layers])
        self._layer_gradients = [layer.gradient_bytes for layer in profile.layers]
        self._gradients = _sums(self._layer_gradients)
        self._optimizer = _sums([layer.optimizer_state_bytes for layer in profile.layers])
        self.send_bytes, self.grad_bytes = (sums.tolist() for sums in cut_bytes(profile, microbatch_size))
        self.legal = _legal(profile)
        self._names = [layer.name for layer in profile.layers]
        self._tied_weights = TiedWeights(profile.layers)
        # Caches: the layouts that a search simulates share most of their intervals.
        self._costs: dict[tuple[int, int, bool, bool], StageCost] = {}
        self._buckets: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}

    def cost(self, start: int, stop: int, *, recompute: bool = False, has_replicas: bool = False) -> StageCost:
        """Returns the cost of layers [start, stop) on a device, which may be one of several replicas."""
        key = (start, stop, recompute, has_replicas)
        cost = self._costs.get(key)
        if cost is None:
            # Rounded once per stage, not per layer, as the simulator does.
            forward_ns = at_speed(self._forward[stop] - self._forward[start], self._speed)
            # Recomputation runs F before each B, or before each I.
            recompute_ns = forward_ns if recompute else 0
            input_grad_ns = at_speed(self._input_grad[stop] - self._input_grad[start], self._speed)
            backward_ns = self._measured_backward_ns(start, stop)
            tied = self.tied_weight_cost(start, stop)
            param_bytes = self._params[stop] - self._params[start] + tied.param_bytes
            cost = self._costs[key] = StageCost(
                forward_ns=forward_ns,
                input_grad_ns=input_grad_ns + recompute_ns,
                weight_grad_ns=at_speed(self._weight_grad[stop] - self._weight_grad[start], self._speed),
                whole_backward_ns=None if backward_ns is None else backward_ns + recompute_ns,
                update_ns=at_speed(self._update[stop] - self._update[start] + tied.update_ns, self._speed),
                param_bytes=param_bytes,
                frozen_bytes=param_bytes - (self._gradients[stop] - self._gradients[start] + tied.gradient_bytes),
                optimizer_bytes=self._optimizer[stop] - self._optimizer[start] + tied.optimizer_bytes,
                stash_bytes=self._stash[stop] - self._stash[start],
                gradient_stash_bytes=self._gradient_stash[stop] - self._gradient_stash[start],
                workspace_bytes=max(self._workspace[start:stop]),
                gradient_done_ns=self._gradient_done_ns(start, stop, recompute_ns) if has_replicas else (),
            )
        return cost

    def tied_weight_cost(self, start: int, stop: int) -> TiedWeightCost:
        """Returns what tied weights add to layers [start, stop)."""
        return self._tied_weights.cost_of(frozenset(self._names[start:stop]))

    def buckets(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Returns the all-reduce buckets of layers [start, stop), as `fill_buckets` does."""
        if (start, stop) not in self._buckets:
            self._buckets[start, stop] = fill_buckets(self._layer_gradients[start:stop][::-1])
        return self._buckets[start, stop]

    def _measured_backward_ns(self, start: int, stop: int) -> int | None:
        """Returns B of layers [start, stop); None if it is I + W, because no layer's B was measured."""
        if self._num_measured_backward[stop] == self._num_measured_backward[start]:
            return None
        return at_speed(self._backward[stop] - self._backward[start], self._speed)

    def _gradient_done_ns(self, start: int, stop: int, recompute_ns: int) -> tuple[tuple[int, int], ...]:
        """Returns when the gradients of each bucket are done after the start of B, and of W; see `StageCost`."""
        done = []
        # A bucket is complete after the backward of the last `end` layers, which come first in a backward.
        for end, _ in self.buckets(start, stop):
            weight_ns = at_speed(self._weight_grad[stop] - self._weight_grad[stop - end], self._speed)
            input_ns = at_speed(self._input_grad[stop] - self._input_grad[stop - end], self._speed)
            backward_ns = self._measured_backward_ns(stop - end, stop)
            done.append((recompute_ns + (input_ns + weight_ns if backward_ns is None else backward_ns), weight_ns))
        return tuple(done)


def stage_on(chains: Sequence[Chain], start: int, stop: int, *, recompute: bool) -> Stage:
    """Returns layers [start, stop) as a stage with a replica for each of `chains`."""
    has_replicas = len(chains) > 1
    return Stage(
        costs=tuple(chain.cost(start, stop, recompute=recompute, has_replicas=has_replicas) for chain in chains),
        # The simulator, too, takes the sizes at a cut from the first replica's profile.
        send_bytes=chains[0].send_bytes[stop],
        grad_bytes=chains[0].grad_bytes[stop],
        bucket_bytes=tuple(num_bytes for _, num_bytes in chains[0].buckets(start, stop)) if has_replicas else (),
        tied_gradients=chains[0].tied_weight_cost(start, stop).gradients,
        recompute=recompute,
    )


def _sums(values: list[int]) -> list[int]:
    """Returns 0, values[0], values[0] + values[1], ... [n] -> [n + 1]"""
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _legal(profile: ModelProfile) -> list[bool]:
    """Returns for each cut whether it keeps layers together that cannot be separated. [layers + 1]"""
    legal = [True] * (len(profile.layers) + 1)
    for first, last in inseparable_layers(profile.layers):
        # Cut c is before layer c, so these are the cuts inside the group of layers first to last.
        for cut in range(first + 1, last + 1):
            legal[cut] = False
    return legal
