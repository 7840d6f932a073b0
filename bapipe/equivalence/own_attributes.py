"""Attributes of a model's modules, and what code keeps outside, as each stage sees them in its own process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from bapipe.equivalence.outcome import Loss
from bapipe.module_state.code_state import reached_by, states_of_code
from bapipe.module_state.python_state import (
    attributes_of,
    copied,
    plain_attributes,
    set_attributes,
)
from bapipe.module_state.reached_state import KeptState


class OwnAttributes:
    """Keeps for every stage what its forwards may change beside their results.

    That is the attributes of its layers' modules, what their hooks and forwards keep outside of them, and what the loss
    reaches, such as a global list.
    What a stage leaves there no other stage can read, nor the loss on another one. Only a module that a stage calls as
    it is can have changed any: of all others it runs the operators.
    """

    def __init__(self, root: nn.Module, stages: Sequence[nn.Module], loss: Loss) -> None:
        kept = {id(one): one for one in (*root.modules(), *root.parameters(), *root.buffers())}
        self._stages, self._loss, self._of_model = stages, loss, tuple(kept.values())
        # What recomputes a stage or puts it under autocast is a module around it, and keeps its own state.
        self._first = [[own for own in attributes_of(stage) if id(own[0]) in kept] for stage in stages]
        self._first_reached = [self._reached_by(stage) for stage in range(len(stages))]
        self._own = [
            copied(attributes, kept | reached_by(reached))
            for attributes, reached in zip(self._first, self._first_reached, strict=True)
        ]
        self._own_reached = list(self._first_reached)

    def _reached_by(self, stage: int) -> list[KeptState]:
        """Returns what a stage may change outside of its modules, as it is now."""
        code = states_of_code(self._stages[stage])
        reaches_loss = self._first[stage] or stage == len(self._stages) - 1
        return [*code, KeptState(self._loss, known=self._of_model)] if reaches_loss else code

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """In this context the modules have the attributes of a stage; afterwards those from the beginning."""
        set_attributes(self._own[stage])
        for state in self._own_reached[stage]:
            state.put_back()
        try:
            yield
        finally:
            self._own_reached[stage] = self._reached_by(stage)
            for state in self._first_reached[stage]:
                state.put_back()
            self._own[stage] = [(part, plain_attributes(part)) for part, _ in self._own[stage]]
            set_attributes(self._first[stage])

    def set_numbers(self) -> None:
        """Gives the modules the numbers that stages have changed."""
        for first, own in zip(self._first, self._own, strict=True):
            for (part, before), (_, after) in zip(first, own, strict=True):
                for name, value in after.items():
                    if isinstance(value, int | float) and value != before.get(name):
                        vars(part)[name] = value
