"""The optimizers of a rank's stages."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from bapipe.runtime.clock import Clock
from bapipe.runtime.optimizers import MakeOptimizer


class Updates:
    """One optimizer a stage; a parameter of several stages belongs to the first."""

    def __init__(self, modules: Mapping[int, nn.Module], make: MakeOptimizer, clock: Clock) -> None:
        self._clock = clock
        self._optimizers: dict[int, Optimizer] = {}
        self._ran: list[tuple[int, object, object]] = []
        taken: set[int] = set()
        for s, module in modules.items():
            trained = [p for p in module.parameters() if p.requires_grad and id(p) not in taken]
            taken |= {id(p) for p in trained}
            if trained:
                self._optimizers[s] = make(trained)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers, by their stages' places."""
        return tuple(self._optimizers.values())

    @property
    def ran(self) -> tuple[tuple[int, object, object], ...]:
        """(stage, start, end) of each update of the last step, by stamps of the clock."""
        return tuple(self._ran)

    def busy_ns(self) -> int:
        """Returns how long the updates of the last step took."""
        return sum(self._clock.ns(end) - self._clock.ns(start) for _, start, end in self._ran)

    def begin(self) -> None:
        """Before a step: forgets the gradients of the last one."""
        self._ran.clear()
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)  # zeroing costs a pass to fill and one more to add

    def update(self, stage: int) -> None:
        """Updates a stage's parameters from their gradients."""
        start = self._clock.stamp()
        if stage in self._optimizers:
            self._optimizers[stage].step()
        self._ran.append((stage, start, self._clock.stamp()))

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate of the updates to come."""
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = value

    def state_bytes(self) -> int:
        """Returns the bytes of what the optimizers keep between steps."""
        state = (v for o in self._optimizers.values() for held in o.state.values() for v in held.values())
        return sum(value.nbytes for value in state if isinstance(value, Tensor))

    def tensors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Returns what the optimizers keep of named parameters, as `name of the parameter:key`."""
        return {
            f"{name}:{key}": value
            for name, parameter in parameters.items()
            for optimizer in self._optimizers.values()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """Gives the optimizers what `tensors` returned of the same parameters."""
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        for optimizer in self._optimizers.values():
            names = [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
            state = {place: found for place, name in enumerate(names) if (found := _of(name, tensors.items()))}
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _of(name: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns a parameter's state by key."""
    return {key.rpartition(":")[2]: value for key, value in tensors if key.rpartition(":")[0] == name}
