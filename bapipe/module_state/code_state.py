"""What the code of a module keeps from call to call outside of the module: in closures, defaults and globals."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import fx, nn

from bapipe.module_state.assigned_attributes import names_in_forward
from bapipe.module_state.iterators import can_be_copied, is_iterator, iterators_copied
from bapipe.module_state.reached_state import KeptState, functions_of, is_plain, methods_of
from bapipe.module_state.variables import closure_of, defaults_of, globals_of
from bapipe.module_state.whose_code import calls_other_code, is_of_the_user
from bapipe.printable import shortened
from bapipe.torch_private.modules import hooks_of, is_scripted


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """What code keeps a number in, or a collection.

    Attributes:
        owner: the id of the function, class or object that has it.
        what: what it is, in words.
        is_length: whether it is the length of a collection.
    """

    owner: int
    what: str
    is_length: bool = False


def states_of_hooks(module: nn.Module) -> list[KeptState]:
    """Returns what the hooks of a module and its parts keep now, each as far as it can be followed.

    That is beside the module's parameters and buffers.
    """
    hooks = {id(hook): hook for part in module.modules() for hook in hooks_of(part)}
    tensors = (*module.parameters(), *module.buffers()) if hooks else ()
    return [KeptState(hook, known=tensors) for hook in hooks.values()]


@dataclass(frozen=True, slots=True)
class ForwardCode:
    """Code of the user's that forwards of a module and its parts call, not that of packages that pip has installed.

    Finding it takes ten times as long as finding what it keeps.

    Attributes:
        code: functions, classes, and collections of classes.
        known: objects that are put back as the module's own.
    """

    code: tuple[object, ...]
    known: tuple[object, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "ForwardCode":
        """Returns the code that the forwards call now."""
        code = {id(one): one for one in _code_of(*module.modules())}
        classes = {kind: None for part in module.modules() for kind in type(part).__mro__} if code else {}
        tensors = (*module.parameters(), *module.buffers()) if code else ()
        return cls((*code.values(),), (*module.modules(), *tensors, *classes))

    def states(self) -> list[KeptState]:
        """Returns what it keeps now outside of the module, as far as it can be followed."""
        return [KeptState(list(self.code), known=self.known)] if self.code else []


def states_of_forwards(module: nn.Module) -> list[KeptState]:
    """Returns what the forwards of a module and its parts keep now outside of these, as far as it can be followed."""
    return ForwardCode.of(module).states()


def states_of_code(module: nn.Module) -> list[KeptState]:
    """Returns what hooks and forwards of a module and its parts keep now outside of these."""
    return [*states_of_hooks(module), *states_of_forwards(module)]


@contextmanager
def state_of_forwards_restored(module: nn.Module) -> Iterator[None]:
    """Forwards may run in this context; afterwards what they keep outside of the module is put back."""
    states = states_of_forwards(module)
    try:
        with iterators_copied(reached_by(states).values()):
            yield
    finally:
        for state in states:
            state.put_back()


def reached_by(states: Iterable[KeptState]) -> dict[int, Any]:
    """Returns the objects that code reaches, by id: they are changed in place and put back, not copied."""
    return {number: one for state in states for number, one in state.followed.items()}


def _code_of(*parts: nn.Module) -> Iterator[object]:
    """Yields the functions that the forwards of modules may call as their attributes, or those of their classes.

    Beside them those collections of classes that the forwards name, and the classes and methods of objects in
    attributes.
    """
    names_of: dict[type, set[str]] = {}
    for part in parts:
        if isinstance(part, fx.GraphModule) or is_scripted(part) or not calls_other_code(part):
            continue
        if type(part) not in names_of:
            names_of[type(part)] = {"forward", *names_in_forward(part)}
            yield from _named_in_class(type(part), names_of[type(part)])
        for name in sorted(vars(part).keys() & names_of[type(part)]):
            yield from _functions_of_attribute(vars(part)[name], names_of[type(part)])


def _named_in_class(kind: type, names: set[str]) -> Iterator[object]:
    for cls in kind.__mro__:
        if is_of_the_user(cls):
            for value in (one for name, one in vars(cls).items() if name in names):
                if isinstance(value, list | dict | set | deque):
                    yield value
                yield from functions_of(value)


def _functions_of_attribute(value: object, names: set[str]) -> Iterator[object]:
    yield from functions_of(value)
    if is_plain(value) and not isinstance(value, nn.Module):
        yield type(value)
        for name, functions in methods_of(type(value)).items():
            if name in {"__call__", *names}:
                yield from functions


def counted(states: Iterable[KeptState]) -> dict[Variable, int | float | str]:
    """Returns the numbers that code keeps now in closures, globals, defaults and objects, and lengths of collections.

    The numbers in a dictionary are among them; what an `itertools.count` gives next is one, as a text.
    """
    found: dict[Variable, int | float | str] = {}
    for one in reached_by(states).values():
        for what, value in _variables_of(one):
            if isinstance(value, list | dict | set | deque):
                found[Variable(owner=id(one), what=what, is_length=True)] = len(value)
            inside = dict.items(value) if isinstance(value, dict) else ()
            entries = ((f"entry {shortened(repr(key), 30)} of {what}", part) for key, part in inside)
            for name, number in ((what, value), *entries):
                if isinstance(number, itertools.count):
                    found[Variable(owner=id(one), what=name)] = repr(number)
                elif isinstance(number, int | float) and not isinstance(number, bool):
                    found[Variable(owner=id(one), what=name)] = number
    return found


class CountedCode:
    """What `counted` gives of a module's forwards, now and later."""

    def __init__(self, module: nn.Module) -> None:
        self._states = states_of_forwards(module)
        self._counts = [counted(self._states)]

    def count(self) -> None:
        """Counts once more."""
        self._counts.append(counted(self._states))

    def changed(self, *, lengths: bool) -> list[Variable]:
        """Returns the variables that changed each time, the lengths of collections only if asked for.

        A table that is made once, and read from then on, changes once.
        """
        first, second, third = self._counts
        return [
            one
            for one, value in third.items()
            if (lengths or not one.is_length)
            and one in second
            and value != second[one]
            and second[one] != first.get(one)
        ]


def reaches(part: nn.Module, variable: Variable) -> bool:
    """Returns whether the forward of a module, without those of its parts, reaches the owner of a variable."""
    code = list(_code_of(part))
    return bool(code) and variable.owner in KeptState(code, known=(part, *type(part).__mro__)).followed


def _variables_of(one: object) -> Iterator[tuple[str, object]]:
    """Yields (what it is, value) of what a function, class or object keeps."""
    if isinstance(one, FunctionType):
        name = one.__qualname__
        yield from ((f"the variable '{variable}' around {name}", value) for variable, value in closure_of(one).items())
        yield from ((f"the global '{variable}'", value) for variable, value in globals_of(one).items())
        for variable, value in defaults_of(one).items():
            yield f"the default of the argument '{variable}' of {name}", value
        yield from ((f"the attribute '{variable}' of {name}", value) for variable, value in vars(one).items())
    elif isinstance(one, nn.Module) or (isinstance(one, type) and issubclass(one, nn.Module)):
        return
    elif isinstance(one, type) or is_plain(one):
        owner = one.__name__ if isinstance(one, type) else f"a {type(one).__name__}"
        yield from ((f"the attribute '{name}' of {owner}", value) for name, value in vars(one).items())


def iterators_not_put_back(module: nn.Module) -> str | None:
    """Says what code of a module advances, or may, in forwards that are tried, because it cannot be copied."""
    reached = reached_by(states_of_code(module)).values()
    held = [pair for one in reached for pair in _variables_of(one)]
    for path, part in module.named_modules():
        named = names_in_forward(part)
        held += [(f"the attribute '{path}.{n}'".replace("'.", "'"), v) for n, v in vars(part).items() if n in named]
    found = (what for what, value in held if is_iterator(value) and not can_be_copied(value))
    what = next(found, None)
    if what is None:
        return None
    return (
        f"{what} is an iterator that cannot be copied, such as a generator: forwards that are tried before training "
        "take values from it, and nobody can put these back; take them from a list by a number that the module counts, "
        "or from an `itertools.count`"
    )
