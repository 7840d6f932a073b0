"""What code may change when it is called: modules that it reaches, and numbers that it keeps."""

from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from functools import partial
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
"""Nor are those with a larger collection in an attribute, such as a vocabulary."""


class KeptState:
    """The state that code keeps, where all of it can be put back.

    Followed are closures, defaults and globals of functions, owners of methods, and what `partial` holds, to modules,
    tensors and constants. Code that reaches other objects, such as a list in which it notes figures, may change them in
    ways that nobody else can undo; and copying modules that hold much would take too long.

    Attributes:
        is_known: whether it reaches neither of these.
    """

    def __init__(self, code: object) -> None:
        self.is_known = True
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
                self._follow_all(one.__self__, one.__func__)
            case partial():
                self._follow_all(one.func, *one.args, *one.keywords.values())
            case tuple() | frozenset():
                self._follow_all(*one)
            case _:
                self.is_known = False

    def _follow_all(self, *several: object) -> None:
        for one in several:
            self._follow(one)

    def _follow_module(self, module: nn.Module) -> None:
        own = [part for part in module.modules() if not type(part).__module__.startswith("torch.nn.")]
        if own:  # those of torch.nn that losses use keep no state
            self._modules.append(module)
            self.is_known = self.is_known and _holds_little(module)
        for part in own:
            classes = (
                one for one in type(part).__mro__ if not one.__module__.startswith("torch.") and one is not object
            )
            methods = (method for one in classes for method in vars(one).values() if isinstance(method, FunctionType))
            self._follow_all(*methods)

    def _follow_function(self, function: FunctionType) -> None:
        if function.__module__.startswith("torch."):
            return
        values = {name: function.__globals__[name] for name in names_in(function) if name in function.__globals__}
        self._restores.append(partial(function.__globals__.update, values))
        for cell in function.__closure__ or ():
            if _is_filled(cell):
                self._restores.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
                self._follow(cell.cell_contents)
        self._follow_all(*values.values(), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


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
