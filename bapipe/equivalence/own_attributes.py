"""Attributes of a model's modules as each stage sees them in a process of its own."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from torch import nn

from bapipe.tracing.python_state import Attributes, plain_attributes


class OwnAttributes:
    """Keeps for every stage the attributes of its layers' modules, which its forwards may set.

    What a stage leaves in an attribute no other stage can read, nor the loss on another one. Only a module that a stage
    calls as it is can have set one: of all others it runs the operators.
    """

    def __init__(self, root: nn.Module, stages: Sequence[nn.Module]) -> None:
        self._first = [_attributes(stage) for stage in stages]
        self._own = [_copies(root, attributes) for attributes in self._first]

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """In this context the modules have the attributes of a stage; afterwards those from the beginning."""
        _set(self._own[stage])
        try:
            yield
        finally:
            self._own[stage] = [(part, plain_attributes(part)) for part, _ in self._own[stage]]
            _set(self._first[stage])

    def set_numbers(self) -> None:
        """Gives the modules the numbers that stages have changed."""
        for first, own in zip(self._first, self._own, strict=True):
            for (part, before), (_, after) in zip(first, own, strict=True):
                for name, value in after.items():
                    if isinstance(value, int | float) and value != before.get(name):
                        vars(part)[name] = value


def _attributes(stage: nn.Module) -> Attributes:
    own_code = (part for part in stage.modules() if not type(part).__module__.startswith("torch."))
    return [(part, plain_attributes(part)) for part in own_code]


def _copies(root: nn.Module, attributes: Attributes) -> Attributes:
    """Returns attributes with copies of their objects, one of each; modules, parameters and buffers are the same."""
    memo = {id(one): one for one in (*root.modules(), *root.parameters(), *root.buffers())}
    copies = []
    for part, values in attributes:
        own = dict(values)
        for name, value in values.items():
            with suppress(Exception):  # an object that refuses to be copied stays as it is
                own[name] = copy.deepcopy(value, memo)
        copies.append((part, own))
    return copies


def _set(attributes: Attributes) -> None:
    for part, values in attributes:
        for name in plain_attributes(part).keys() - values.keys():
            del vars(part)[name]
        vars(part).update(values)
