"""Plain values that forwards may read: in attributes, in what these hold, in globals and in closures."""

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from bapipe.module_state.names_in_code import globals_in, names_in
from bapipe.module_state.python_state import plain_attributes
from bapipe.module_state.reached_state import methods_of
from bapipe.module_state.variables import cells_of, closure_of
from bapipe.module_state.whose_code import is_of_a_library, is_of_the_user, top_package

PLAIN = (int, float, str, type(None))
"""Types of plain values: numbers, flags, texts and None."""

_MAX_OBJECTS, _MAX_ITEMS, _MAX_DEPTH = 1_000, 100, 3
"""How many objects and functions are looked into at most; how many items a collection of settings has, where more are
data; and how deep settings are nested.
"""


class Place:
    """Where plain values are.

    Attributes:
        owner: what has the values, by key.
        values: those that it had, by key: plain values, and the collections and objects that hold some.
        name: says in words what the value of a key is.
    """

    __slots__ = ("_before", "_get", "name", "owner", "values")

    def __init__(self, owner: Any, values: Mapping[Any, object], name: Callable[[Any], str]) -> None:
        self.owner, self.name, self.values = owner, name, dict(values)
        self._remember()

    def is_unchanged(self) -> bool:
        """Returns whether all values are what they were; False if they cannot be compared.

        This is called at every step, and takes well below 1 µs: tuples of the same objects are equal.
        """
        try:
            return bool(self._get(self.owner) == self._before)
        except Exception:  # one is gone, or an object of the user's raises it
            return False

    def changed(self) -> list[tuple[Any, object]]:
        """Returns the keys whose values are other objects now, each with that object, GONE if there is none."""
        now = {key: self._now(key) for key in self.values}
        return [(key, value) for key, value in now.items() if value is not self.values[key]]

    def forget(self, key: Any) -> None:
        """Leaves a value out from now on."""
        del self.values[key]
        self._remember()

    def _remember(self) -> None:
        keys, before = tuple(self.values), tuple(self.values.values())
        self._get: Callable[[Any], Any] = itemgetter(*keys) if keys else _nothing
        self._before = before[0] if len(keys) == 1 else before

    def _now(self, key: Any) -> object:
        try:
            return self.owner[key]
        except LookupError:
            return GONE


class Gone:
    """Stands for a value that is not there any more."""


GONE = Gone()


def named_values(modules: Mapping[str, nn.Module]) -> list[Place]:
    """Returns the places of the plain values that the forwards of modules may read; `modules` are by path.

    These are numbers in attributes of the modules, and what the code of the forwards names otherwise: texts and None in
    attributes of the modules and their classes, entries of collections and objects in attributes, and all of these in
    globals and closures of the user's own code.
    """
    return _Search(modules).places()


class _Search:
    """Looks for values by the names in the code of forwards, and of the methods and functions that this names."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._kinds: dict[type, None] = {}  # of modules, and of objects that these hold
        self._names: set[str] = set()
        self._functions: dict[FunctionType, None] = {}
        self._seen: set[object] = set()  # ids of objects, and of dictionaries of globals with a name
        for kind in dict.fromkeys(map(type, modules.values())):
            self._kinds[kind] = None
            self._follow(getattr(kind, "forward", None))

    def places(self) -> list[Place]:
        found: list[Place] = []
        num_known = -1
        while num_known != (num_known := len(self._functions) + len(self._kinds)):  # what it names may name more
            for kind in self._kinds:
                for name, functions in methods_of(kind).items():
                    for function in functions if name in self._names else ():
                        self._follow(function)
            self._seen = set(map(id, self._modules.values()))
            found = [*self._in_modules(), *self._in_functions()]
        return [place for place in found if place.values]

    def _follow(self, function: object) -> None:
        """Notes what a function names, and follows the functions of the user's that it may call."""
        if not isinstance(function, FunctionType) or function in self._functions:
            return
        if len(self._functions) == _MAX_OBJECTS or is_of_a_library(function):
            return
        self._functions[function] = None
        self._names.update(names_in(function))
        if is_of_the_user(function):
            for value in (*_globals(function).values(), *closure_of(function).values()):
                self._follow(value)

    def _in_modules(self) -> Iterator[Place]:
        for path, module in self._modules.items():
            own = plain_attributes(module)
            numbers = {name for name, value in own.items() if isinstance(value, int | float)}
            watched = {name: value for name, value in own.items() if name in self._names | numbers}
            yield from self._in(watched, vars(module), f"the attribute '{path}.".replace("'.", "'"))
        for kind in list(self._kinds):
            for one in kind.__mro__:
                yield from self._inside(one, f"the attribute '{one.__name__}", _MAX_DEPTH)

    def _in_functions(self) -> Iterator[Place]:
        for function in list(self._functions):
            if not is_of_the_user(function):
                continue
            scope = function.__globals__
            named = {name: value for name, value in _globals(function).items() if (id(scope), name) not in self._seen}
            self._seen.update((id(scope), name) for name in named)
            yield from self._in(named, scope, "the global variable '")
            yield from self._in(closure_of(function), _Cells(function), "the variable '")

    def _in(
        self,
        values: dict[Any, object],
        owner: Any,
        prefix: str,
        depth: int = _MAX_DEPTH,
        suffix: str = "",
    ) -> Iterator[Place]:
        """Yields the place of some values, and those inside of them."""
        watched = {key: value for key, value in values.items() if isinstance(value, PLAIN) or _is_looked_into(value)}

        def name(key: Any) -> str:
            return f"{prefix}{key!r}]" if suffix else f"{prefix}{key}"

        yield Place(owner, watched, lambda key: f"{name(key)}'")
        for key, value in watched.items():
            yield from self._inside(value, name(key), depth)

    def _inside(self, value: Any, name: str, depth: int) -> Iterator[Place]:
        """Yields the places in a collection, or in an object, class or module of Python, of what code names there."""
        if depth == 0 or id(value) in self._seen or len(self._seen) > _MAX_OBJECTS or not _is_looked_into(value):
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            yield from self._in(dict(value), value, f"{name}[", depth - 1, "]")
        elif isinstance(value, list | tuple):
            yield from self._in(dict(enumerate(value)), value, f"{name}[", depth - 1, "]")
        else:
            if not isinstance(value, type | ModuleType):
                self._kinds.setdefault(type(value))
            named = {key: one for key, one in vars(value).items() if key in self._names and not key.startswith("__")}
            yield from self._in(named, vars(value), f"{name}.", depth - 1)


def _is_looked_into(value: object) -> bool:
    if isinstance(value, dict | list | tuple):
        return len(value) <= _MAX_ITEMS
    if isinstance(value, type | ModuleType):
        return is_of_the_user(value)
    is_code = isinstance(value, Tensor | nn.Module | FunctionType)
    return hasattr(value, "__dict__") and not is_code and top_package(type(value)) != "torch"


def _nothing(_: object) -> tuple[()]:
    return ()


def _globals(function: FunctionType) -> dict[str, object]:
    scope = function.__globals__
    return {name: scope[name] for name in globals_in(function) if name in scope}


class _Cells:
    """The variables of a closure, by name."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = cells_of(function)

    def __getitem__(self, name: str) -> object:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            return GONE
