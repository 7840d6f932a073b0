"""Gives the layers of some stages storage and initial values, and moves all others to the meta device."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.module_state.python_random import all_generators_restored, seed_cpu_generators
from bapipe.module_state.python_state import values_restored
from bapipe.runtime.other_ranks import is_on_another_rank, mark_as_on_another_rank
from bapipe.runtime.rng import derived_seed
from bapipe.torch_private.modules import reset_method, without_weak_references
from bapipe.torch_private.tensors import give_storage, version
from bapipe.tracing.model import layer_states, unused_state
from bapipe.tracing.stages import Split

_UNSET = -(2**40) - 7
"""Fills int64 tensors before initialization, as NaN fills floats: one that still begins with it was never set."""


def materialize(
    parts: Split,
    tensors: Sequence[Tensor],
    device: torch.device,
    seed: int,
    initialize: Callable[[nn.Module], None] | None,
) -> None:
    """Moves the given parameters and buffers of a model to a device, and all others to the meta device, in place.

    Of the given `tensors`, one on the meta device is initialized by the first layer of the model that uses it: by
    `reset_parameters()`, and then by `initialize(module)` if given, under a seed that depends only on `seed` and the
    layer's name. So the initial weights do not depend on the cuts. Tensors that have values keep them.

    Raises:
        InvalidModel: a parameter or buffer on the meta device that nothing initializes, or that `drop_others` put there
            for an earlier pipeline of the module.
    """
    model = parts.model
    local = {id(tensor) for tensor in tensors}
    states = layer_states(model)
    for name, tensor in unused_state(model).items():
        states.setdefault(name.rpartition(".")[0], {})[name] = tensor
    with without_weak_references(model.root):
        for layer, state in states.items():
            unset = {name: tensor for name, tensor in state.items() if tensor.is_meta and id(tensor) in local}
            if unset:
                _check_not_dropped(unset)
                _initialize_layer(model.root, layer, state, seed, initialize)
        for tensor in _all_tensors(model.root, model.module):
            if id(tensor) in local and tensor.device != device:
                _swap(tensor, tensor.detach().to(device))
    drop_others(parts, tensors)


def drop_others(parts: Split, tensors: Iterable[Tensor]) -> None:
    """Moves all parameters and buffers of a model except `tensors` to the meta device, in place.

    They are marked (`other_ranks`), so that another pipeline of the same module does not initialize them as if they
    never had values, and the caller does not use them as if they still had. Tensors outside of the module that its
    forwards use, such as globals, are left alone: the loss or the data may use them, too.
    """
    model = parts.model
    attributes = (value for part in model.root.modules() for value in vars(part).values())
    of_model = {id(tensor) for tensor in (*_all_tensors(model.root), *attributes)}
    outside = {id(tensor) for tensor in model.module.buffers()} - of_model
    kept = {id(tensor) for tensor in tensors} | outside
    named = (*model.module.named_parameters(), *model.module.named_buffers())
    names = {id(tensor): name for name, tensor in named}
    with without_weak_references(model.root):
        for tensor in _all_tensors(model.root, model.module):
            if id(tensor) not in kept:
                if not tensor.is_meta:
                    _swap(tensor, torch.empty_like(tensor, device="meta"))
                if tensor.is_meta:
                    mark_as_on_another_rank(tensor, names.get(id(tensor), "a constant"))


def _all_tensors(*modules: nn.Module) -> list[Tensor]:
    """Returns every parameter and buffer once."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return list({id(tensor): tensor for tensor in tensors}.values())


def _check_not_dropped(unset: dict[str, Tensor]) -> None:
    dropped = next((name for name, tensor in unset.items() if is_on_another_rank(tensor)), None)
    if dropped is not None:
        raise InvalidModel(
            f"'{dropped}' has no values in this process: an earlier Pipeline of the same module left it to another "
            "rank. Build the module again, with the trained values from a checkpoint of that Pipeline"
        )


def _initialize_layer(
    root: nn.Module,
    layer: str,
    state: dict[str, Tensor],
    seed: int,
    initialize: Callable[[nn.Module], None] | None,
) -> None:
    # On the CPU, so that the values do not depend on the device.
    unset = {name: tensor for name, tensor in state.items() if tensor.is_meta}
    for tensor in unset.values():
        _swap(tensor, _filled_with_marker(tensor))
    filled = {name: version(tensor) for name, tensor in unset.items()}
    written = {id(tensor) for tensor in unset.values()}
    with all_generators_restored(), torch.no_grad():
        seed_cpu_generators(derived_seed(seed, layer))
        for module in _owners(root, layer, unset):
            # A layer's reset also sets parameters that it shares with an earlier layer: these keep their values.
            known = (t for t in _may_be_reset(module, initialize) if not (t.is_meta or id(t) in written))
            with values_restored(known):
                reset_layer(module, initialize)
    for name, tensor in unset.items():
        if _is_unset(tensor, filled[name]):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise InvalidModel(
                f"{kind} '{name}' is on the meta device and neither the layer's reset_parameters() nor the model's "
                "initialize gives it a value: build the model on a real device, or set it there"
            )


def reset_layer(module: nn.Module, initialize: Callable[[nn.Module], None] | None) -> None:
    """Sets the parameters of a layer's module by `reset_parameters()` of its parts, and then by `initialize`."""
    for child in reversed(list(module.modules())):  # parents last, as when the module is constructed
        reset = reset_method(child)
        if reset is not None:
            reset()
    if initialize is not None:
        initialize(module)


def _owners(root: nn.Module, layer: str, unset: Iterable[str]) -> list[nn.Module]:
    """Returns the layer's module, and modules outside it that hold parameters or buffers which the layer uses."""
    modules = dict(root.named_modules())
    path = layer.partition("#")[0]
    outside = (name.rpartition(".")[0] for name in unset if not name.startswith(f"{path}."))
    return [modules[name] for name in dict.fromkeys((path, *outside)) if name in modules]


def _may_be_reset(module: nn.Module, initialize: Callable[[nn.Module], None] | None) -> list[Tensor]:
    """Returns the parameters and buffers that `reset_layer` may set, each once: not those of parts without a reset."""
    return _all_tensors(
        *(part for part in module.modules() if initialize is not None or reset_method(part) is not None)
    )


def _filled_with_marker(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu").fill_(_marker(tensor.dtype))


def _marker(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    if dtype == torch.int64:
        return _UNSET
    return True if dtype == torch.bool else 77


def _is_unset(tensor: Tensor, filled: int) -> bool:
    """Returns whether a tensor was never set; `filled` is its count of writes when it got the marker.

    Any value of a bool or a small integer may be a real one. Of those that hold the marker, what nothing has written to
    was never set. The count alone does not tell, as it leaves out writes through `tensor.data`.
    """
    if tensor.numel() == 0:
        return False
    first = tensor.detach().reshape(-1)[0]
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(first.isnan())
    if first.item() != _marker(tensor.dtype):
        return False
    return tensor.dtype == torch.int64 or version(tensor) == filled


def _swap(tensor: Tensor, value: Tensor) -> None:
    """Gives `tensor` the storage of `value`; all references to the tensor, such as tied weights, see the new one.

    If something outside of Python holds the tensor, such as a scripted module, or a weight that the old `weight_norm`
    has computed from it, only its data can be replaced, and only by data on a real device. So such a tensor is not
    dropped, which costs nothing but memory.

    Raises:
        InvalidModel: such a tensor is on the meta device.
    """
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    try:
        give_storage(tensor, value)
    except RuntimeError as error:
        if tensor.is_meta:
            raise InvalidModel(
                f"a tensor of shape {tuple(tensor.shape)} on the meta device cannot get values, because an autograd "
                "graph or a scripted module holds it: build the model on a real device"
            ) from error
        if not value.is_meta:
            tensor.data = value.detach()
