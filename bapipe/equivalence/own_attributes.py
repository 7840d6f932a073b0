"""Attributes of a model's modules, and what code keeps outside, as each stage sees them in its own process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from bapipe.equivalence.outcome import Loss
from bapipe.module_state.backward_state import BackwardState
from bapipe.module_state.code_state import states_of_code
from bapipe.module_state.python_state import PythonState, attributes_of, generator_states_of
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
        attributes = [[own for own in attributes_of(stage) if id(own[0]) in kept] for stage in stages]
        self._has_code = [bool(own) for own in attributes]
        self._first = [
            PythonState(attributes[s], generator_states_of(stage), self._code_of(s)) for s, stage in enumerate(stages)
        ]
        self._own = [first.copied(dict(kept)) for first in self._first]
        self._backward_states = [
            BackwardState([part for part in stage.modules() if id(part) in kept]) for stage in stages
        ]
        for state in self._backward_states:
            state.begin_step()

    def _code_of(self, stage: int) -> list[KeptState]:
        """Returns what a stage may change outside of its modules, as it is now."""
        code = states_of_code(self._stages[stage])
        reaches_loss = self._has_code[stage] or stage == len(self._stages) - 1
        return [*code, KeptState(self._loss, known=self._of_model)] if reaches_loss else code

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """In this context the modules have the attributes of a stage; afterwards those from the beginning."""
        self._own[stage].put_back()
        try:
            yield
        finally:
            self._own[stage] = self._first[stage].now(self._code_of(stage))
            self._first[stage].put_back()

    @contextmanager
    def of_forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """As `of`, for the forward of a micro-batch, whose backward finds what it leaves."""
        with self.of(stage), self._backward_states[stage].forward(microbatch):
            yield

    @contextmanager
    def of_backward(self, stage: int, microbatch: int, *, is_last: bool) -> Iterator[None]:
        """As `of`, for a backward of a micro-batch; `is_last` if none of it is left to run afterwards."""
        with self.of(stage), self._backward_states[stage].backward(microbatch, is_last=is_last):
            yield

    def set_numbers(self) -> None:
        """Gives the modules the numbers that stages have changed."""
        for first, own in zip(self._first, self._own, strict=True):
            for (part, before), (_, after) in zip(first.attributes, own.attributes, strict=True):
                for name, value in after.items():
                    if isinstance(value, int | float) and value != before.get(name):
                        vars(part)[name] = value
