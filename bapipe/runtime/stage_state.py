"""The parameters and buffers of a rank's stages, each once, and their names in the original module."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from bapipe.formats.prediction import Memory
from bapipe.runtime.gradient_values import gradient_bytes
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.tracing.stages import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """Parameters and buffers of this rank's stages.

    Attributes:
        modules: this rank's stages.
        unused: parameters and buffers of the original module that no layer uses, on the rank that keeps them.
        names: names in the original module by the id of a tensor; a tied one has several.
        keys: names of the original module's state dict, which leaves out buffers that are not persistent.
        non_persistent: names of the buffers that it leaves out and that training may change.
    """

    modules: Mapping[int, nn.Module]
    unused: tuple[Tensor, ...]
    names: Mapping[int, tuple[str, ...]]
    keys: frozenset[str]
    non_persistent: frozenset[str] = frozenset()
    _names_of_places: dict[tuple[int, str], tuple[str, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Keeps the names by stage and place, too: a tensor that a forward assigns later has none by its id."""
        for stage, place, tensor in self._places():
            self._names_of_places[stage, place] = self.names.get(id(tensor), (place,))

    def _places(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yields (stage, place, tensor) of all parameters and buffers, a tied one several times.

        Its place is a name in the stage's module.
        """
        for stage, module in self.modules.items():
            for place, parameter in module.named_parameters(remove_duplicate=False):
                yield stage, place, parameter
            for place, buffer in module.named_buffers(remove_duplicate=False):
                yield stage, place, buffer

    def tensors(self) -> list[Tensor]:
        """Returns the parameters and buffers, each once."""
        used = [tensor for module in self.modules.values() for tensor in (*module.parameters(), *module.buffers())]
        return list({id(tensor): tensor for tensor in (*used, *self.unused)}.values())

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that the stages use, each once."""
        return list({id(p): p for module in self.modules.values() for p in module.parameters()}.values())

    def state_dict(self) -> dict[str, Tensor]:
        """Returns parameters and buffers by their names in the original module; tied ones by all of them."""
        return {name: tensor.detach() for name, tensor in self._named() if name in self.keys}

    def non_persistent_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers (no copies) that training may change and that are not in the state dict, by name."""
        return {name: tensor for name, tensor in self._named() if name in self.non_persistent}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name in the original module, tensor); of several with one name the last one is current."""
        for tensor in self.unused:
            yield from ((name, tensor) for name in self.names[id(tensor)])
        places = list(self._places())
        for stage, place, tensor in places:
            yield from ((name, tensor) for name in self._names_of_places.get((stage, place), (place,)))
        for _, place, tensor in places:  # places that shared a tensor may have different ones now
            yield place, tensor

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that the stages use, by their first names in the original module.

        A forward may have assigned another one, as of a frozen teacher: it has the name of its place.
        """
        named: dict[str, nn.Parameter] = {}
        for stage, place, tensor in self._places():
            if isinstance(tensor, nn.Parameter):
                first, *_ = self._names_of_places.get((stage, place), (place,))
                if named.setdefault(first, tensor) is not tensor:  # no longer the same as at the place of that name
                    named[place] = tensor
        return named

    def counted_parameters(self, layout: ProcessLayout, parts: Split) -> tuple[nn.Parameter, ...]:
        """Returns parameters for sums over all ranks: each of the model is counted by one of the ranks that have it.

        That is the first replica of the first stage that uses it.
        """
        devices = layout.schedule.devices
        first = {id(tied.parameter): devices[min(tied.stages)][0] for tied in parts.tied}
        counted = {
            id(parameter): parameter
            for s, module in self.modules.items()
            for parameter in module.parameters()
            if first.get(id(parameter), devices[s][0]) == layout.rank
        }
        return tuple(counted.values())

    def memory(self, optimizer_bytes: int) -> Memory:
        """Returns the memory of parameters, buffers, gradients and optimizer state; what lives within a step is 0."""
        return Memory(
            params=sum(tensor.nbytes for tensor in self.tensors()),
            gradients=sum(gradient_bytes(p.grad) for p in self.parameters() if p.grad is not None),
            optimizer=optimizer_bytes,
            stash=0,
            workspace=0,
            buffers=0,
        )
