"""What code may change when it is called: modules and objects that it reaches, and numbers that it keeps."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from functools import partial
from logging import Logger
from types import BuiltinFunctionType, CellType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.tracing.python_state import state_restored
from bapipe.tracing.randomness import names_in

_CONSTANTS = (
    int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, Tensor, type, ModuleType,
    BuiltinFunctionType, MethodDescriptorType,
)  # fmt: skip


_MAX_BYTES = 2**24
"""Modules with tensors of more bytes are not copied before each call."""

_MAX_ITEMS = 1000
"""Nor are those with a larger collection in an attribute, such as a vocabulary; nor more items of other collections."""


class _Plain:
    """An object with nothing but attributes."""


class KeptState:
    """The state that code keeps, where all of it can be put back.

    Followed are closures, defaults and globals of functions, owners of methods (to the attributes that these name), and
    what `partial`, collections and objects hold, to modules, tensors and constants. Other objects, such as files, may
    change in ways that nobody else can undo; and copying those that hold much would take too long.

    Attributes:
        obstacle: what it reaches of these, in words; None if nothing.
    """

    def __init__(self, code: object) -> None:
        self.obstacle: str | None = None
        self._num_items = 0
        self._loggers: list[Logger] = []
        self._modules: list[nn.Module] = []
        self._restores: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        self._follow(code)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """In this context the code may be called; afterwards its state is as it was when this was made."""
        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(state_restored(module, compares=False))
            for logger in self._loggers:
                stack.callback(setattr, logger, "disabled", logger.disabled)
                logger.disabled = True  # it would note each call twice
            yield
        for restore in self._restores:
            restore()

    def _follow(self, one: Any) -> None:
        if id(one) in self._seen or isinstance(one, _CONSTANTS):
            return
        self._seen.add(id(one))
        match one:
            case nn.Module():
                self._follow_module(one)
            case FunctionType():
                self._follow_function(one)
            case MethodType():
                self._follow_method(one)
            case partial():
                self._follow_all(one.func, *one.args, *one.keywords.values())
            case tuple() | frozenset():
                self._follow_items(one, one)
            case list():
                self._restores.append(partial(one.__setitem__, slice(None), one.copy()))
                self._follow_items(one, one)
            case set() | dict():
                self._restore_filled(one)
                self._follow_items(one, one.values() if isinstance(one, dict) else one)
            case Logger():
                self._loggers.append(one)
            case _ if _is_plain(one):
                self._restore_filled(vars(one))
                self._follow_items(vars(one), vars(one).values())
                self._follow_all(*_methods(type(one)).values())
            case _:
                self._meet(f"an object of type {type(one).__name__}")

    def _meet(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle

    def _follow_items(self, collection: Sized, values: Iterable[object]) -> None:
        self._num_items += len(collection)
        if self._num_items > _MAX_ITEMS:
            self._meet(f"more than {_MAX_ITEMS:,} values in collections and objects")
        else:
            self._follow_all(*values)

    def _restore_filled(self, one: dict[Any, Any] | set[Any]) -> None:
        self._restores += one.clear, partial(one.update, one.copy())

    def _follow_method(self, method: MethodType) -> None:
        """Follows only what a method, and those of the same object that it names, name of the object."""
        owner = method.__self__
        if not _is_plain(owner):
            self._follow_all(owner, method.__func__)
            return
        methods, named, left = _methods(type(owner)), set[str](), [method.__func__]
        while left:
            function = left.pop()
            self._follow(function)
            new = set(names_in(function)) - named
            named |= new
            left += [methods[name] for name in new if name in methods]
        self._restore_filled(vars(owner))
        self._follow_all(*(value for name, value in vars(owner).items() if name in named))

    def _follow_all(self, *several: object) -> None:
        for one in several:
            self._follow(one)

    def _follow_module(self, module: nn.Module) -> None:
        own = [part for part in module.modules() if not type(part).__module__.startswith("torch.nn.")]
        if own:  # those of torch.nn that losses use keep no state
            self._modules.append(module)
            if not _holds_little(module):
                self._meet(f"a module of type {type(module).__name__}, which holds much")
        for part in own:
            self._follow_all(*_methods(type(part)).values())

    def _follow_function(self, function: FunctionType) -> None:
        if _is_of_a_library(function.__module__):
            return
        values = {name: function.__globals__[name] for name in names_in(function) if name in function.__globals__}
        self._restores.append(partial(function.__globals__.update, values))
        for cell in function.__closure__ or ():
            if _is_filled(cell):
                self._restores.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
                self._follow(cell.cell_contents)
        self._follow_all(*values.values(), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _is_plain(one: object) -> bool:
    """Returns whether an object holds nothing but attributes: no slots, and nothing in C."""
    return hasattr(one, "__dict__") and type(one).__basicsize__ == _Plain.__basicsize__


def _methods(kind: type) -> dict[str, FunctionType]:
    """Returns the functions of a class and its bases, but for those of libraries, by name."""
    classes = (one for one in reversed(kind.__mro__) if not _is_of_a_library(one.__module__))
    found = (pair for one in classes for pair in vars(one).items())
    return {name: function for name, function in found if isinstance(function, FunctionType)}


def _is_of_a_library(module: str | None) -> bool:
    """Returns whether code is torch's or Python's own."""
    top = (module or "").partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


def _holds_little(module: nn.Module) -> bool:
    tensors = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    attributes = (value for part in module.modules() for value in vars(part).values())
    largest = max(
        (len(value) for value in attributes if isinstance(value, Sized) and not isinstance(value, str | Tensor)),
        default=0,
    )
    return tensors <= _MAX_BYTES and largest <= _MAX_ITEMS


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
