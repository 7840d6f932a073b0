"""What a module's forward changes in the module itself, beside its results, and how to undo it."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from bapipe.module_state.code_state import reached_by, states_of_code, states_of_hooks
from bapipe.module_state.copies import deep_copy
from bapipe.module_state.iterators import iterators_copied
from bapipe.module_state.left_outside import left_outside
from bapipe.module_state.reached_state import KeptState, put_value_back
from bapipe.module_state.whose_code import calls_other_code, own_classes
from bapipe.torch_private.modules import is_scripted
from bapipe.torch_private.tensors import FakeTensor, is_view, version

Attributes = list[tuple[nn.Module, dict[str, object]]]
"""Modules with attributes of theirs, by name."""

Generator = torch.Generator | random.Random

GeneratorStates = list[tuple[Generator, Any]]
"""Random generators with their states."""


@dataclass(frozen=True, slots=True)
class PythonState:
    """What modules keep in Python at one moment, beside tensors.

    Attributes:
        attributes: those of modules.
        generators: random generators among these, which stay the same objects.
        code: what hooks and forwards keep outside of modules.
    """

    attributes: Attributes
    generators: GeneratorStates
    code: list[KeptState]

    def copied(self, copies: dict[int, Any]) -> "PythonState":
        """Returns the state with copies of attributes that are not immutable: one of each for all modules that have it.

        What refuses to be copied stays as it is (`deep_copy`). So do generators and what code reaches, which `put_back`
        gives their earlier states.

        Args:
            copies: what stands for an object, by its id: another one, or the object itself if it is not to be copied.
                Each copy is added.
        """
        copies |= reached_by(self.code) | {id(one): one for one, _ in self.generators} | copies
        attributes = []
        for part, values in self.attributes:
            own = dict(values)
            for name, value in values.items():
                if not isinstance(value, _NO_STATE):
                    own[name] = deep_copy(value, copies)
            attributes.append((part, own))
        return replace(self, attributes=attributes)

    def now(self, code: list[KeptState]) -> "PythonState":
        """Returns what the same modules and generators keep now; `code` is what their code does."""
        attributes = [(part, plain_attributes(part)) for part, _ in self.attributes]
        return PythonState(attributes, [(one, _state_of(one)) for one, _ in self.generators], code)

    def set_attributes(self) -> None:
        """Gives the modules these attributes, and no others."""
        for part, values in self.attributes:
            for name in plain_attributes(part).keys() - values.keys():
                del vars(part)[name]
            vars(part).update(values)

    def put_back(self) -> None:
        """Gives the modules these attributes, and generators and what code reaches their states."""
        self.set_attributes()
        for one, state in self.generators:
            one.setstate(state) if isinstance(one, random.Random) else one.set_state(state)
        for kept in self.code:
            kept.put_back()


@contextmanager
def state_restored(
    module: nn.Module, *, parameters: bool = False, compares: bool = True, outside: bool = True
) -> Iterator[dict[int, Tensor]]:
    """The module may run in this context; afterwards its attributes and buffers are what they were, with their values.

    Its parameters and buffers are leaves again, and need gradients if they did. Numbers of the classes of its parts are
    what they were, and so is what its hooks and forwards keep outside of it, in closures, defaults and globals
    (`code_state`). Tensors that they leave elsewhere are removed (`left_outside`).

    Attributes that are not immutable are replaced by copies meanwhile. Yields copies of the values of tensors, by the
    tensor's id.

    Args:
        parameters: whether to restore the values of parameters too, for which these are copied.
        compares: whether tensors that have changed are found by comparing them, which waits for a GPU; else by torch's
            counts of writes, which miss those of batch norm and those to `tensor.data`.
        outside: whether to undo what forwards change outside of the module.
    """
    modules = [part for part in module.modules() if not is_scripted(part)]
    hidden = {id(tensor): tensor for tensor in hidden_tensors(module).values()}
    own = _tensors(modules)
    values = [
        (tensor, tensor.detach().clone(), version(tensor))
        for tensor in (own | hidden).values()
        if _has_value(tensor) and (parameters or id(tensor) in hidden or not isinstance(tensor, nn.Parameter))
    ]
    leaves = [(tensor, tensor.requires_grad) for tensor in (own | hidden).values() if tensor.is_leaf]
    attributes = [dict(vars(part)) for part in modules]
    registries = [
        [(value, dict(value)) for value in map(vars(part).get, _REGISTRIES) if value is not None] for part in modules
    ]
    state = PythonState(
        # What a graph module has beside tensors and generators is its graph and its code.
        attributes=[(part, plain_attributes(part)) for part in modules if not isinstance(part, fx.GraphModule)],
        generators=generator_states_of(module),
        code=states_of_code(module) if outside else states_of_hooks(module),
    )
    copies: dict[int, Any] = {id(one): one for one in (*modules, *own.values(), *hidden.values())}
    try:
        with (
            iterators_copied(reached_by(state.code).values()) as iterators,
            class_numbers_restored(modules),
            left_outside(module) if outside else nullcontext(),
        ):
            copies |= iterators  # copies live as long as weak references to them are needed
            state.copied(copies).set_attributes()
            yield {id(tensor): value for tensor, value, _ in values}
    finally:
        for part, before, own_registries in zip(modules, attributes, registries, strict=True):
            vars(part).clear()
            vars(part).update(before)
            for registry, entries in own_registries:
                registry.clear()
                registry.update(entries)
        state.put_back()
        for tensor, needs_gradient in leaves:
            _make_leaf(tensor, needs_gradient)
        with torch.no_grad():
            for tensor, value, count in values:
                if compares or version(tensor) != count:
                    put_value_back(tensor, value, count)


@contextmanager
def values_restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """The values of tensors may change in this context; afterwards they are what they were."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


def _make_leaf(tensor: Tensor, needs_gradient: bool) -> None:
    """Takes a tensor out of the graph that a write to it, in place and with gradients, has made it a result of."""
    if not tensor.is_leaf and not is_view(tensor):  # torch cannot take out a view alone
        tensor.detach_()
    if tensor.is_leaf and tensor.requires_grad != needs_gradient:
        tensor.requires_grad_(needs_gradient)


def _has_value(tensor: Tensor) -> bool:
    is_dense = not is_lazy(tensor) and tensor.layout is torch.strided  # models with others are refused
    return is_dense and not tensor.is_meta and not isinstance(tensor, FakeTensor)


_REGISTRIES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""Attributes of every module: its parameters, buffers, children and hooks, by name. They are restored in place."""


def numbers_kept(owner: object) -> dict[str, int | float]:
    """Returns the numbers among the attributes of an object and, if it is a module, of its parts, by path."""
    return {name: value for name, value in _attributes_kept(owner, (int, float)) if not isinstance(value, bool)}


def same_value(a: object, b: object) -> bool:
    """Returns whether two values that are not tensors are the same, as NaN is, which differs from itself."""
    return a == b or repr(a) == repr(b)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same values; one that is NaN in both is the same."""
    if torch.equal(a, b):
        return True
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def one_of_each_class(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the first part of a module of each class that is not torch's own, by path."""
    first: dict[type, tuple[str, nn.Module]] = {}
    for path, part in module.named_modules():
        if own_classes(type(part)):
            first.setdefault(type(part), (path, part))
    return dict(first.values())


def class_numbers(parts: Mapping[str, nn.Module]) -> dict[str, int | float]:
    """Returns the numbers among the attributes of the classes of parts of a module, by path."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, part in parts.items()
        for cls in reversed(own_classes(type(part)))  # what a class has hides what its bases have
        for name, value in _numbers_of(cls).items()
    }


@contextmanager
def class_numbers_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Numbers of the classes of modules may change in this context; afterwards they are what they were.

    One that a class did not have stays, for other code may count on it, unless it hides one of its bases.
    """
    before = {cls: _numbers_of(cls) for module in modules for cls in own_classes(type(module))}
    try:
        yield
    finally:
        for cls, numbers in before.items():
            for name in _numbers_of(cls).keys() - numbers.keys():
                if any(hasattr(base, name) for base in cls.__bases__):
                    delattr(cls, name)
            for name, value in numbers.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)


def _numbers_of(cls: type) -> dict[str, int | float]:
    found = vars(cls).items()
    return {name: value for name, value in found if isinstance(value, int | float) and not isinstance(value, bool)}


def generators_kept(owner: object) -> dict[str, Generator]:
    """Returns the random generators that an object keeps as `numbers_kept`, by path."""
    return dict(_attributes_kept(owner, (torch.Generator, random.Random)))


def tensors_kept(owner: object) -> dict[str, Tensor]:
    """Returns the tensors with values that an object keeps as `numbers_kept`, by path; also parameters and buffers."""
    found: dict[str, Tensor] = dict(_attributes_kept(owner, (Tensor,)))
    if isinstance(owner, nn.Module):
        found |= dict(owner.named_parameters()) | dict(owner.named_buffers())
    return {name: value for name, value in found.items() if value.layout is torch.strided and not value.is_meta}


def _attributes_kept(owner: object, types: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    parts = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
    for path, part in parts:
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, types):
                yield f"{path}.{name}".lstrip("."), value


def generator_state(generator: Generator) -> object:
    """Returns the state of a random generator, which can be compared."""
    state = _state_of(generator)
    return state.numpy().tobytes() if isinstance(state, Tensor) else state


def _state_of(generator: Generator) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def generator_states_of(module: nn.Module) -> GeneratorStates:
    """Returns the random generators among the attributes of a module and its parts, with their states."""
    generators = {id(one): one for one in generators_kept(module).values()}.values()
    return [(one, _state_of(one)) for one in generators]


def hidden_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors in attributes of modules that are neither their parameters nor their buffers, by path.

    They may be inside of collections, of other objects, and of modules that are no parts of the module.
    """
    seen = {id(one) for one in (*module.modules(), *module.parameters(), *module.buffers())}
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        if not isinstance(part, fx.GraphModule):
            for name, value in plain_attributes(part).items():
                if not isinstance(value, _NO_STATE):
                    found |= _tensors_inside(value, f"{path}.{name}".lstrip("."), seen)
    return found


def _tensors_inside(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors inside a value with their paths; `seen` are the ids of objects not to look into."""
    if isinstance(value, _NO_STATE) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
        return
    for name, part in _parts(value):
        yield from _tensors_inside(part, f"{path}.{name}", seen)


def _parts(value: object) -> Iterable[tuple[object, object]]:
    """Returns what an object consists of, by name, as far as `copy.deepcopy` would copy it."""
    if isinstance(value, nn.Module):
        own = () if isinstance(value, fx.GraphModule) else plain_attributes(value).items()
        return (*value.named_parameters(), *value.named_buffers(), *value.named_children(), *own)
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return enumerate(value)
    return getattr(value, "__dict__", {}).items()


def attributes_of(module: nn.Module) -> Attributes:
    """Returns the attributes of the modules whose calls run other code than torch's own."""
    parts = (part for part in module.modules() if not isinstance(part, fx.GraphModule) and not is_scripted(part))
    own_code = (part for part in parts if calls_other_code(part))
    return [(part, plain_attributes(part)) for part in own_code]


def plain_attributes(part: nn.Module) -> dict[str, object]:
    """Returns the attributes of a module beside its parameters, buffers, children and hooks."""
    return {name: value for name, value in vars(part).items() if name not in _REGISTRIES}


_NO_STATE = (
    int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type, FunctionType, MethodType, ModuleType,
)  # fmt: skip
"""Types of attributes that are not copied: they are immutable, or code. There are others, which copies leave alone."""


def _tensors(modules: list[nn.Module]) -> dict[int, Tensor]:
    """Returns the parameters, buffers and other attributes of modules that are tensors, by id."""
    own = (value for part in modules for value in (*part.parameters(False), *part.buffers(False), *vars(part).values()))
    return {id(value): value for value in own if isinstance(value, Tensor)}
