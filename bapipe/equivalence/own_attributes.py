"""Attributes of a model's modules, and what hooks keep, as each stage sees them in a process of its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from bapipe.tracing.python_state import (
    attributes_of,
    copied,
    plain_attributes,
    reached_by,
    set_attributes,
    states_of_hooks,
)


class OwnAttributes:
    """Keeps for every stage the attributes of its layers' modules and what hooks keep, which its forwards may change.

    What a stage leaves in an attribute no other stage can read, nor the loss on another one. Only a module that a stage
    calls as it is can have set one: of all others it runs the operators.
    """

    def __init__(self, root: nn.Module, stages: Sequence[nn.Module]) -> None:
        kept = {id(one): one for one in (*root.modules(), *root.parameters(), *root.buffers())}
        self._stages = stages
        self._first = [attributes_of(stage) for stage in stages]
        self._first_of_hooks = [states_of_hooks(stage) for stage in stages]
        self._own = [
            copied(attributes, kept | reached_by(hooks))
            for attributes, hooks in zip(self._first, self._first_of_hooks, strict=True)
        ]
        self._own_of_hooks = list(self._first_of_hooks)

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """In this context the modules have the attributes of a stage; afterwards those from the beginning."""
        set_attributes(self._own[stage])
        for state in self._own_of_hooks[stage]:
            state.put_back()
        try:
            yield
        finally:
            self._own_of_hooks[stage] = states_of_hooks(self._stages[stage])
            for state in self._first_of_hooks[stage]:
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
