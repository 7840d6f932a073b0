"""Builds a factory's model in a rank, with parameters on the meta device if its layers can initialize them alone.

A rank needs only the values of its own stages. If each layer by itself initializes its parameters as the factory does,
they are made on the meta device, and `materialize` gives storage and values to the rank's own, so that no process ever
holds the whole model. This is found by recording operators: those by which the factory sets a parameter must be those
by which the layer would.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from bapipe.errors import InvalidModel
from bapipe.module_state.python_random import all_generators_restored, seed_all_generators
from bapipe.runtime.materialize import reset_layer
from bapipe.torch_private.tensors import (
    DispatchMode,
    argument_schemas,
    give_storage,
    parameter_hooks,
    storage_key,
    tree_leaves,
    tree_map,
)
from bapipe.tracing.layer_choice import LayerChoice
from bapipe.zoo.example import Example
from bapipe.zoo.factory import Factory, build

_FILLING = frozenset(
    f"aten.{name}_" for name in ("bernoulli", "copy", "exponential", "fill", "normal", "random", "uniform", "zero")
)
"""Operators that overwrite all values of a tensor."""

_Write = tuple[str, ...]
"""An operator that writes to a tensor, the part that it writes to, and its other arguments, as texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBuild:
    """Builds the same example in every process.

    Attributes:
        seed: seed of what the factory draws from the global generators of torch, Python and numpy.
        without_values: whether parameters are made on the meta device.
    """

    factory: Factory
    arguments: Mapping[str, object]
    seed: int
    without_values: bool

    def __call__(self) -> Example:
        with all_generators_restored(), _parameters_on_meta() if self.without_values else nullcontext():
            seed_all_generators(self.seed)
            return build(self.factory, self.arguments)


def model_build(factory: Factory, arguments: Mapping[str, object], seed: int) -> tuple[ModelBuild, Example]:
    """Returns how ranks are to build a model, and the example that was built so.

    Raises:
        InvalidModel: the factory fails.
    """
    plain = ModelBuild(factory=factory, arguments=arguments, seed=seed, without_values=False)
    without_values = ModelBuild(factory=factory, arguments=arguments, seed=seed, without_values=True)
    try:
        with _WriteRecorder() as made, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns where values are lost, which is found below
            example = without_values()
    except InvalidModel:  # such as code that reads a parameter; if it fails for another reason, it fails below too
        return plain, plain()
    loss = example.loss
    loss_has_values = not isinstance(loss, nn.Module) or not any(p.is_meta for p in loss.parameters())
    if loss_has_values and _draws_its_own_values(example.module, made, example.initialize):
        return without_values, example
    return plain, plain()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Moves each parameter to the meta device when a module gets it; all other tensors have values as usual."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is nn.Parameter and not parameter.is_meta:
            moved = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            give_storage(parameter, moved)

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


class _WriteRecorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that write to tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[int, list[_Write]] = {}
        self._written: list[Tensor] = []  # kept alive, so that no other storage gets the key of one of them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        for schema, value in zip(argument_schemas(func), args, strict=False):
            if schema.alias_info is not None and schema.alias_info.is_write and _is_on_meta(value):
                part = f"{tuple(value.shape)} {value.stride()} {value.storage_offset()}"
                others = tree_map(_without_values, (args, {k: v for k, v in keywords.items() if k != "generator"}))
                self._written.append(value)
                self._writes.setdefault(storage_key(value), []).append((str(func.overloadpacket), part, repr(others)))
        return func(*args, **keywords)

    def of(self, tensor: Tensor) -> tuple[_Write, ...]:
        """Returns the writes to a tensor and its views, in order."""
        return tuple(self._writes.get(storage_key(tensor), ()))


def _is_on_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _without_values(value: object) -> object:
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else value


def _draws_its_own_values(
    module: nn.Module, made: _WriteRecorder, initialize: Callable[[nn.Module], None] | None
) -> bool:
    """Returns whether each layer by itself initializes its parameters as the factory did.

    The factory may have left torch's default values if `initialize`, which is called for each layer anyway, replaces
    them.
    """
    if any(_is_on_meta(value) for part in module.modules() for value in _tensors_beside_parameters(part)):
        return False  # computed from a parameter
    if any(map(parameter_hooks, module.parameters())):
        return False  # hooks may hold what was computed from a parameter, such as the mask of a pruned one
    try:
        reset, initialized = _layer_writes(module, None), _layer_writes(module, initialize)
    except Exception:  # whatever the model's own code raises on tensors without values
        return False
    for parameter in module.parameters():
        values = _last_values(made.of(parameter), parameter)
        own = [_last_values(writes[id(parameter)], parameter) for writes in (initialized, reset) if parameter.is_meta]
        if parameter.is_meta and not (own[0] and values in own):
            return False
    return True


def _tensors_beside_parameters(module: nn.Module) -> Iterator[object]:
    yield from module.buffers(recurse=False)
    own = {name: value for name, value in vars(module).items() if isinstance(value, Tensor | list | tuple | dict)}
    for name, value in own.items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from (leaf for leaf in tree_leaves(value) if not isinstance(leaf, nn.Parameter))


def _layer_writes(root: nn.Module, initialize: Callable[[nn.Module], None] | None) -> dict[int, tuple[_Write, ...]]:
    """Returns the writes to each parameter, by its id, when layers are initialized one by one."""
    writes: dict[int, tuple[_Write, ...]] = {}
    inside: set[nn.Module] = set()
    for path, module in root.named_modules():
        if module in inside:
            continue
        whole = LayerChoice().is_layer(module, path)
        inside |= set(module.modules()) if whole else {module}
        parameters = [p for p in module.parameters(recurse=whole) if p.is_meta and id(p) not in writes]
        if parameters:
            with torch.no_grad(), _WriteRecorder() as recorder:
                reset_layer(module, initialize)
            writes |= {id(parameter): recorder.of(parameter) for parameter in parameters}
    return writes


def _last_values(writes: tuple[_Write, ...], parameter: nn.Parameter) -> tuple[_Write, ...]:
    """Returns the writes that determine a parameter's values: the last that fills all of it, and those after it."""
    whole = f"{tuple(parameter.shape)} {parameter.stride()} {parameter.storage_offset()}"
    filling = [i for i, (operator, part, _) in enumerate(writes) if operator in _FILLING and part == whole]
    return writes[filling[-1] :] if filling else ()
