"""What code may change when it is called: modules and objects that it reaches, and numbers that it keeps."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from itertools import chain, islice
from logging import Logger
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bapipe.module_state.iterators import iterators_copied
from bapipe.module_state.names_in_code import names_in
from bapipe.module_state.variables import cells_of, defaults_of, globals_of
from bapipe.module_state.whose_code import is_of_a_library, is_of_the_user, is_of_torch, top_package
from bapipe.torch_private.modules import hooks_of
from bapipe.torch_private.tensors import FakeTensor, version, version_kept

_CONSTANTS = (
    int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice, Enum, Decimal, date, timedelta, PurePath,
    re.Pattern, torch.dtype, torch.device, BuiltinFunctionType, MethodDescriptorType,
)  # fmt: skip


CachedFunction = type(lru_cache(lambda: None))
"""The type of what `functools.lru_cache` and `functools.cache` make."""

_MAX_BYTES = 2**24
"""Modules and arrays of more bytes are not copied before each call, nor more of tensors; their changes are noticed."""

_MAX_ITEMS = 1000
"""Nor are modules with a larger collection in an attribute, such as a vocabulary; nor are more objects followed."""


_NOT_USED = frozenset(
    {"__init__", "__new__", "__del__", "__post_init__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__",
     "__repr__", "__str__", "__format__", "__init_subclass__", "__class_getitem__", "__deepcopy__", "__copy__"}
)  # fmt: skip
"""Special methods that no operator runs."""

_COMPUTE_NAMES = frozenset({"setattr", "delattr", "vars", "__dict__"})
"""What code changes attributes by whose names it computes, as `setattr(kept, f"mean_{layer}", mean)` does."""


class _Plain:
    """An object with nothing but attributes."""


class KeptState:
    """The state that code keeps, where all of it can be put back.

    Followed are closures, defaults and globals of functions, what `partial` and collections hold, and of owners of
    methods and other objects those attributes and methods that the code names, to modules, tensors, arrays and
    constants. Other objects, such as files, may change in ways that nobody else can undo; and copying those that hold
    much would take too long.

    Attributes:
        obstacle: the first that it reaches of these, in words; None if nothing. What else it reaches is followed, as
            long as that is not too much.
        followed: the objects that it reaches, and those known before, by id.
    """

    def __init__(
        self,
        code: object,
        module_restored: Callable[[nn.Module], AbstractContextManager[object]] | None = None,
        known: Iterable[object] = (),
    ) -> None:
        """`known` are objects that others put back.

        `module_restored` returns the context that `restored` enters for a module that the code reaches. By default a
        module is followed as other objects are, without its parameters, buffers and parts.
        """
        self.obstacle: str | None = None
        self.followed: dict[int, object] = {id(one): one for one in known}
        self._module_restored = module_restored
        self._names: set[str] = set()  # of attributes, in the code followed
        self._objects: list[object] = []
        self._loggers: list[Logger] = []
        self._contexts: list[Callable[[], AbstractContextManager[object]]] = []  # of modules
        self._tensors: list[tuple[Tensor, int, Tensor | None]] = []  # (one, its version, its value if it is small)
        self._restores: list[Callable[[], object]] = []
        self._num_followed, self._num_bytes = 0, 0
        self._looked_at = (0, 0)  # how many names, and how many objects, `_follow_attributes` has seen
        self._items: list[object] = [code]  # of collections, which are followed behind all that is named
        try:
            self._follow_breadth_first()
        except RecursionError:
            self._meet("objects that are nested too deep to be followed")
        for one in self._objects:
            self._look_at(one, self._note_attributes)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """In this context the code may be called; afterwards its state is put back.

        A tensor that is too large to have been copied, and has changed, is an obstacle from then on.
        """
        with ExitStack() as stack:
            for context_of_module in self._contexts:
                stack.enter_context(context_of_module())
            for logger in self._loggers:
                stack.callback(setattr, logger, "disabled", logger.disabled)
                logger.disabled = True  # it would note each call twice
            stack.callback(self.put_back)
            with iterators_copied(self.followed.values()):
                yield

    def put_back(self) -> None:
        """Gives all but modules with contexts of their own the state that they had when this was made."""
        for restore in self._restores:
            try:
                restore()
            except Exception as error:  # whatever a collection of the user's own raises
                self._meet(f"what cannot be put back ({type(error).__name__})")
        with torch.no_grad():
            for tensor, before, value in self._tensors:
                if value is not None:
                    put_value_back(tensor, value, before)
                elif version(tensor) != before:
                    self._meet(f"a tensor of shape {tuple(tensor.shape)} that it changes")

    def _meet(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle

    def _follow_breadth_first(self) -> None:
        """Follows what is named before what collections hold, however much that is: there is a limit to all of it.

        So where code names a collection of many objects and a number behind it, the number is not left out.
        """
        while self._items:
            items, self._items = self._items, []
            self._follow_all(items)
            self._follow_attributes()

    def _follow(self, one: Any) -> None:
        self._look_at(one, self._follow_one)

    def _follow_one(self, one: Any) -> None:
        if isinstance(one, _CONSTANTS) or id(one) in self.followed or self._num_followed > _MAX_ITEMS:
            return
        self.followed[id(one)] = one
        self._num_followed += not isinstance(one, Tensor)
        if self._num_followed > _MAX_ITEMS:
            self._meet(f"more than {_MAX_ITEMS:,} objects")
            return
        match one:
            case Tensor():
                self._follow_tensor(one)
            case nn.Module():
                self._follow_module(one)
            case FunctionType():
                self._follow_function(one)
            case MethodType():
                self._follow_all((one.__self__, one.__func__))
            case partial():
                self._follow_all((one.func, *one.args, *one.keywords.values()))
            case tuple() | frozenset():
                self._items += islice(one, _MAX_ITEMS)  # those behind are noted in a list that grows
            case list() | deque():
                self._restores.append(partial(_refill, one, list(one)))
                self._items += islice(one, _MAX_ITEMS)
            case set():
                self._restores.append(partial(_update, one, set(one)))
                self._items += islice(one, _MAX_ITEMS)
            case dict():
                self._restores.append(partial(_update, one, dict(dict.items(one))))
                self._items += dict.values(one)
            case _ if top_package(type(one)) == "numpy":
                self._follow_array(one)
            case type() | ModuleType():
                self._follow_named(one)
            case CachedFunction():
                self._follow_cached(one)
            case Logger():
                self._loggers.append(one)
            case _ if is_plain(one):
                self._objects.append(one)
                self._follow(type(one))
            case _:
                self._meet(f"an object of type {type(one).__name__}")

    def _follow_all(self, several: Iterable[object]) -> None:
        for one in several:
            self._follow(one)

    def _follow_array(self, one: Any) -> None:
        """Follows what numpy has made: an array, or a constant such as a number, a type or a function."""
        names = {kind.__name__ for kind in type(one).__mro__}  # numpy need not be imported
        if names & {"generic", "dtype", "ufunc", "_ArrayFunctionDispatcher"}:
            return
        if "ndarray" not in names:
            self._meet(f"an object of type {type(one).__name__}")
        elif one.flags.writeable:
            self._num_bytes += one.nbytes
            if self._num_bytes > _MAX_BYTES or one.dtype.hasobject:
                self._meet(f"an array of shape {one.shape}, which holds much, or objects")
                return
            self._restores.append(partial(one.__setitem__, ..., one.copy()))

    def _follow_named(self, one: type | ModuleType) -> None:
        """Notes a class or a module of the user's, of which the code may change an attribute."""
        if is_of_the_user(one):
            self._objects.append(one)

    def _follow_attributes(self) -> None:
        """Follows the attributes that the code names until it reaches no more."""
        while self._looked_at != (now := (len(self._names), len(self._objects))):
            self._looked_at = now
            for one in list(self._objects):
                self._look_at(one, lambda one: self._follow_all(self._named_of(one)))

    def _look_at(self, one: object, look: Callable[[Any], None]) -> None:
        try:
            look(one)
        except RecursionError:
            raise
        except Exception:  # whatever an object of the user's raises when it is looked at
            self._meet(f"an object of type {type(one).__name__}, which cannot be looked at")

    def _note_attributes(self, one: object) -> None:
        before = {name: value for name, value in vars(one).items() if self._may_change(one, name)}
        self._restores.append(partial(_reset, one, before, partial(self._may_change, one)))

    def _named_of(self, one: object) -> list[object]:
        """Returns what code may reach of an object; what a class gives its objects in another form is left out."""
        own = vars(one).items()
        values = {name: value for name, value in own if not isinstance(one, type) or not hasattr(value, "__get__")}
        methods = methods_of(one if isinstance(one, type) else type(one))
        reached = methods | {name: [value] for name, value in values.items()}
        return [value for name, several in reached.items() if self._is_named(one, name) for value in several]

    def _may_change(self, one: object, name: str) -> bool:
        """Returns whether code may set or delete an attribute."""
        is_of_object = not isinstance(one, type | ModuleType)
        return self._is_named(one, name) or (is_of_object and not self._names.isdisjoint(_COMPUTE_NAMES))

    def _is_named(self, one: object, name: str) -> bool:
        """Returns whether code names an attribute, or it may use it by an operator or code of Python's own."""
        has_classes_of_the_user = isinstance(one, type | ModuleType | nn.Module)
        is_of_python = not has_classes_of_the_user and any(map(is_of_a_library, type(one).__mro__[:-1]))
        return (
            name in self._names
            or is_of_python
            or (name.startswith("__") and name not in _NOT_USED and name in methods_of(type(one)))
        )

    def _follow_tensor(self, tensor: Tensor) -> None:
        if is_lazy(tensor) or tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.is_inference():
            return
        num_bytes = tensor.nbytes if tensor.layout is torch.strided else _MAX_BYTES + 1
        is_small = self._num_bytes + num_bytes <= _MAX_BYTES and len(self._tensors) < _MAX_ITEMS
        self._num_bytes += num_bytes if is_small else 0
        self._tensors.append((tensor, version(tensor), tensor.detach().clone() if is_small else None))

    def _follow_module(self, module: nn.Module) -> None:
        if self._module_restored is None:
            self._objects.append(module)
            self._follow(type(module))
            return
        parts = list(module.modules())
        self._follow_all(hook for part in parts for hook in hooks_of(part))
        own = [part for part in parts if not is_of_torch(part)]
        if own:  # those of torch.nn that losses use keep no state
            self._contexts.append(partial(self._module_restored, module))
            if not _holds_little(module):
                self._meet(f"a module of type {type(module).__name__}, which holds much")
        for part in own:
            self._follow(type(part))
            self._follow_all(chain.from_iterable(methods_of(type(part)).values()))

    def _follow_cached(self, function: Any) -> None:
        self._meet(f"an object of type {type(function).__name__}")
        self._follow(function.__wrapped__)

    def _follow_function(self, function: FunctionType) -> None:
        if is_of_a_library(function):
            return
        self._names.update(names_in(function))
        self._restores.append(partial(_update, vars(function), dict(vars(function))))
        self._follow_all(vars(function).values())
        values = globals_of(function)
        self._restores.append(partial(function.__globals__.update, values))
        for cell in cells_of(function).values():
            self._restores.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
            self._follow(cell.cell_contents)
        self._follow_all((*values.values(), *defaults_of(function).values()))


def put_value_back(tensor: Tensor, value: Tensor, before: int) -> None:
    """Gives a tensor back its value, also of another shape or type.

    Torch counts that, if it has counted a write to it since the version `before`: so a graph that has saved the tensor
    in between does not compute with another value in silence.
    """
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        tensor.data = value
    elif not torch.equal(tensor, value):  # it may be read-only, or expanded
        with version_kept(tensor) if version(tensor) == before else nullcontext():
            tensor.copy_(value)


def _refill(one: MutableSequence[Any], items: list[Any]) -> None:
    if len(one) != len(items) or any(now is not before for now, before in zip(one, items, strict=True)):
        one.clear()
        one.extend(items)


def _update(one: dict[Any, Any] | set[Any], before: Any) -> None:
    """Sets and deletes what has changed alone: others may use the collection meanwhile, or it may be a frozen one."""
    if isinstance(one, dict):
        now = dict(dict.items(one))  # as they are kept: a class of its own may give others
        for key in now.keys() - before.keys():
            del one[key]
        for key, value in before.items():
            if key not in now or now[key] is not value:
                one[key] = value
    else:
        one &= before
        one |= before


def _reset(one: Any, before: dict[str, object], is_named: Callable[[str], bool]) -> None:
    """The same of those attributes of an object that are named."""
    now = dict(vars(one))
    for name in [name for name in now if is_named(name) and name not in before]:
        delattr(one, name) if isinstance(one, type) else vars(one).pop(name)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            setattr(one, name, value) if isinstance(one, type) else vars(one).update({name: value})


def is_plain(one: object) -> bool:
    """Returns whether an object holds nothing but attributes: no slots, and nothing in C."""
    return hasattr(one, "__dict__") and type(one).__basicsize__ == _Plain.__basicsize__


def methods_of(kind: type) -> dict[str, list[FunctionType]]:
    """Returns the functions of methods and properties of a class and its bases, but for those of libraries, by name."""
    classes = (one for one in reversed(kind.__mro__) if not is_of_a_library(one))
    found = {name: functions_of(value) for one in classes for name, value in vars(one).items()}
    methods = {name: [one for one in own if isinstance(one, FunctionType)] for name, own in found.items()}
    return {name: own for name, own in methods.items() if own}


def functions_of(value: object) -> list[object]:
    """Returns the functions that run when a value is called, or is used as an attribute of a class."""
    if isinstance(value, property):
        return [one for one in (value.fget, value.fset) if one is not None]
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return [function] if isinstance(function, FunctionType | MethodType | partial | CachedFunction) else []


def _holds_little(module: nn.Module) -> bool:
    tensors = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    attributes = (value for part in module.modules() for value in vars(part).values())
    largest = max(
        (len(value) for value in attributes if isinstance(value, Sized) and not isinstance(value, str | Tensor)),
        default=0,
    )
    return tensors <= _MAX_BYTES and largest <= _MAX_ITEMS
