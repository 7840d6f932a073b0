"""The parts of a module that keep more from call to call than parameters and buffers, found once for many calls."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, fx, nn

from bapipe.module_state.code_state import ForwardCode, states_of_hooks
from bapipe.module_state.python_state import (
    PythonState,
    attributes_of,
    generator_states_of,
    generators_kept,
    hidden_tensors,
)
from bapipe.module_state.whose_code import calls_other_code
from bapipe.torch_private.modules import hooks_of


@dataclass(frozen=True, slots=True)
class StateOwners:
    """The parts of a module whose attributes its forward may change, by path; none is inside of another.

    These are the outermost ones whose calls run code from outside torch: torch's layers keep numbers in buffers only.
    To ask all parts takes longer than the forward of a stage of small layers.
    """

    module: nn.Module
    parts: tuple[tuple[str, nn.Module], ...]
    has_hooks: bool

    @classmethod
    def of(cls, module: nn.Module) -> "StateOwners":
        """Finds them; hooks, and forwards that replace those of classes, may be added later.

        If a part outside of these holds a tensor or a random generator, as the graph of a stage may, it is the module.
        """
        parts = tuple(_outermost(module, "", set()))
        inside = {number for _, part in parts for number in _held(part)}
        return cls(
            module,
            parts if _held(module) <= inside else (("", module),),
            any(hooks_of(part) for part in module.modules()),
        )

    def hidden_tensors(self, own: set[int]) -> dict[str, Tensor]:
        """Returns the tensors in attributes, by path; `own` are the ids of the module's parameters and buffers."""
        return {
            f"{path}.{name}".lstrip("."): tensor
            for path, part in self.parts
            for name, tensor in hidden_tensors(part).items()
            if id(tensor) not in own
        }

    def state(self, code: ForwardCode) -> PythonState:
        """Returns what the parts, hooks, and the code of forwards keep now."""
        return PythonState(
            attributes=[one for _, part in self.parts for one in attributes_of(part)],
            generators=[one for _, part in self.parts for one in generator_states_of(part)],
            code=[*(states_of_hooks(self.module) if self.has_hooks else []), *code.states()],
        )


def _outermost(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost parts, by path, that run code from outside torch; a graph calls only what it contains."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if calls_other_code(module) and not isinstance(module, fx.GraphModule):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}".lstrip("."), seen)


def _held(module: nn.Module) -> set[int]:
    """Returns the ids of tensors and generators in the attributes of a module and its parts."""
    return {id(one) for one in (*hidden_tensors(module).values(), *generators_kept(module).values())}
