"""The layers in a line as one kind of device runs them: any run of layers is one subtraction away."""

from collections.abc import Sequence

from msgspec import UNSET

from bapipe.formats.profile import ModelProfile
from bapipe.simulator.interval_costs import cut_bytes
from bapipe.simulator.stage_cost import Stage, StageCost, fill_buckets
from bapipe.simulator.tied_weights import TiedWeightCost, TiedWeights, inseparable_layers
from bapipe.units import at_speed


class Chain:
    """A profile at one micro-batch size, in the profile's layer order, on devices of one speed.

    `send_bytes[c]` and `grad_bytes[c]` are the activations and gradients alive at the cut before layer c; `legal[c]`
    says whether it may be cut: layers that share parameters of unknown size stay together.
    """

    def __init__(self, profile: ModelProfile, microbatch_size: int, speed: float) -> None:
        measured = profile.at(microbatch_size)
        self.num_layers, self.profile_name = len(measured), profile.device.kind
        self._speed = speed
        self._forward = _sums([m.forward_ns for m in measured])
        self._input_grad = _sums([m.input_grad_ns for m in measured])
        self._weight_grad = _sums([m.weight_grad_ns for m in measured])
        self._backward = _sums([m.whole_backward_ns for m in measured])
        self._wholes = _sums([m.backward_ns is not UNSET for m in measured])
        self._gradient_stash = _sums([m.left_by_input_grad_bytes for m in measured])
        self._stash = _sums([m.stash_bytes for m in measured])
        self._workspace = [m.workspace_bytes for m in measured]
        self._update = _sums([layer.update_ns for layer in profile.layers])
        self._params = _sums([layer.param_bytes for layer in profile.layers])
        self._optimizer = _sums([layer.optimizer_state_bytes for layer in profile.layers])
        self.send_bytes, self.grad_bytes = (sums.tolist() for sums in cut_bytes(profile, microbatch_size))
        self.legal = _legal(profile)
        self._layer_params = [layer.param_bytes for layer in profile.layers]
        self._names = [layer.name for layer in profile.layers]
        self._shares = TiedWeights(profile.layers)
        self._costs: dict[tuple[int, int, bool, bool], StageCost] = {}
        self._buckets: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}

    def cost(self, start: int, stop: int, *, recompute: bool = False, reduced: bool = False) -> StageCost:
        """Returns the cost of layers `start` to `stop`, the last one left out, on one or several devices."""
        key = (start, stop, recompute, reduced)
        found = self._costs.get(key)
        if found is None:
            forward_ns = at_speed(self._forward[stop] - self._forward[start], self._speed)
            again_ns = forward_ns if recompute else 0
            input_grad_ns = at_speed(self._input_grad[stop] - self._input_grad[start], self._speed)
            whole_ns = self._whole_backward_ns(start, stop)
            sharing = self.sharing(start, stop)
            found = self._costs[key] = StageCost(
                forward_ns=forward_ns,
                input_grad_ns=input_grad_ns + again_ns,
                weight_grad_ns=at_speed(self._weight_grad[stop] - self._weight_grad[start], self._speed),
                whole_backward_ns=None if whole_ns is None else whole_ns + again_ns,
                update_ns=at_speed(self._update[stop] - self._update[start] + sharing.update_ns, self._speed),
                param_bytes=self._params[stop] - self._params[start] + sharing.param_bytes,
                optimizer_bytes=self._optimizer[stop] - self._optimizer[start] + sharing.optimizer_bytes,
                stash_bytes=self._stash[stop] - self._stash[start],
                gradient_stash_bytes=self._gradient_stash[stop] - self._gradient_stash[start],
                workspace_bytes=max(self._workspace[start:stop]),
                gradient_done_ns=self._done_ns(start, stop, again_ns) if reduced else (),
            )
        return found

    def sharing(self, start: int, stop: int) -> TiedWeightCost:
        """Returns what sharing parameters with other stages adds to layers `start` to `stop`."""
        return self._shares.cost_of(frozenset(self._names[start:stop]))

    def buckets(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Returns the all-reduce buckets of layers `start` to `stop`, as `fill_buckets` does."""
        if (start, stop) not in self._buckets:
            self._buckets[start, stop] = fill_buckets(self._layer_params[start:stop][::-1])
        return self._buckets[start, stop]

    def _whole_backward_ns(self, start: int, stop: int) -> int | None:
        if self._wholes[stop] == self._wholes[start]:
            return None
        return at_speed(self._backward[stop] - self._backward[start], self._speed)

    def _done_ns(self, start: int, stop: int, again_ns: int) -> tuple[tuple[int, int], ...]:
        done = []
        for end, _ in self.buckets(start, stop):
            weight_ns = at_speed(self._weight_grad[stop] - self._weight_grad[stop - end], self._speed)
            input_ns = at_speed(self._input_grad[stop] - self._input_grad[stop - end], self._speed)
            whole_ns = self._whole_backward_ns(stop - end, stop)
            done.append((again_ns + (input_ns + weight_ns if whole_ns is None else whole_ns), weight_ns))
        return tuple(done)


def stage_on(chains: Sequence[Chain], start: int, stop: int, *, recompute: bool) -> Stage:
    """Returns layers `start` to `stop` as a stage on devices that each run the layers as one of `chains`."""
    shared = len(chains) > 1
    return Stage(
        costs=tuple(chain.cost(start, stop, recompute=recompute, reduced=shared) for chain in chains),
        send_bytes=chains[0].send_bytes[stop],
        grad_bytes=chains[0].grad_bytes[stop],
        bucket_bytes=tuple(num_bytes for _, num_bytes in chains[0].buckets(start, stop)) if shared else (),
        tied_gradients=chains[0].sharing(start, stop).gradients,
        recompute=recompute,
    )


def _sums(values: list[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _legal(profile: ModelProfile) -> list[bool]:
    legal = [True] * (len(profile.layers) + 1)
    for first, last in inseparable_layers(profile.layers):
        for cut in range(first + 1, last + 1):
            legal[cut] = False
    return legal
