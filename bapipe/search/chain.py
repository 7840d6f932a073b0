"""The layers in a line as one kind of device runs them: any run of layers is one subtraction away."""

from msgspec import UNSET

from bapipe.cost import StageCost
from bapipe.profile import ModelProfile
from bapipe.units import at_speed


class Chain:
    """A profile at one micro-batch size, in the profile's layer order, on devices of one speed.

    `send_bytes[c]` and `grad_bytes[c]` are the activations and gradients alive at the cut before layer c; `legal[c]`
    says whether it may be cut: layers that share parameters stay together.
    """

    def __init__(self, profile: ModelProfile, microbatch_size: int, speed: float) -> None:
        measured = profile.at(microbatch_size)
        self.num_layers = len(measured)
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
        self.send_bytes, self.grad_bytes = _alive(profile, microbatch_size)
        self.legal = _legal(profile)
        self._costs: dict[tuple[int, int], StageCost] = {}

    def cost(self, start: int, stop: int) -> StageCost:
        """Returns the cost of layers `start` to `stop`, the last one left out."""
        found = self._costs.get((start, stop))
        if found is None:
            found = self._costs[start, stop] = StageCost(
                forward_ns=at_speed(self._forward[stop] - self._forward[start], self._speed),
                input_grad_ns=at_speed(self._input_grad[stop] - self._input_grad[start], self._speed),
                weight_grad_ns=at_speed(self._weight_grad[stop] - self._weight_grad[start], self._speed),
                whole_backward_ns=self._whole_backward_ns(start, stop),
                update_ns=at_speed(self._update[stop] - self._update[start], self._speed),
                param_bytes=self._params[stop] - self._params[start],
                optimizer_bytes=self._optimizer[stop] - self._optimizer[start],
                stash_bytes=self._stash[stop] - self._stash[start],
                gradient_stash_bytes=self._gradient_stash[stop] - self._gradient_stash[start],
                workspace_bytes=max(self._workspace[start:stop]),
            )
        return found

    def _whole_backward_ns(self, start: int, stop: int) -> int | None:
        if self._wholes[stop] == self._wholes[start]:
            return None
        return at_speed(self._backward[stop] - self._backward[start], self._speed)


def _sums(values: list[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _legal(profile: ModelProfile) -> list[bool]:
    index = {layer.name: i for i, layer in enumerate(profile.layers)}
    legal = [True] * (len(profile.layers) + 1)
    for i, layer in enumerate(profile.layers):
        for other in layer.shares:
            for cut in range(min(i, index[other]) + 1, max(i, index[other]) + 1):
                legal[cut] = False
    return legal


def _alive(profile: ModelProfile, microbatch_size: int) -> tuple[list[int], list[int]]:
    """Bytes of the tensors made before, and used at or after, each layer."""
    last_use = {tensor: i for i, layer in enumerate(profile.layers) for tensor in layer.inputs}
    send = [0] * (len(profile.layers) + 1)
    grad = [0] * (len(profile.layers) + 1)
    for i, (layer, measured) in enumerate(zip(profile.layers, profile.at(microbatch_size), strict=True)):
        for tensor, num_bytes in zip(layer.outputs, measured.output_bytes, strict=True):
            for cut in range(i + 1, last_use.get(tensor, i) + 1):
                send[cut] += num_bytes
                grad[cut] += 0 if tensor in layer.no_gradient else num_bytes
    return send, grad
