"""Real storage and initial values for the layers of some stages, and none for the rest."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.runtime.split import Split
from bapipe.torch_private import reset_method, without_weak_references
from bapipe.tracing import layer_states, unused_state

_UNSET = -(2**40) - 7
"""Fills integers before initialisation, as NaN does floats, so that what no one sets is found."""


def materialize(
    parts: Split,
    tensors: Iterable[Tensor],
    device: torch.device,
    seed: int,
    initialize: Callable[[nn.Module], None] | None = None,
) -> None:
    """Puts some parameters and buffers of a model on a device, in place, and all others on the meta device.

    A parameter or buffer on the meta device takes its value from the first layer of the model that uses it: that of
    `reset_parameters()`, and then of `initialize(module)` where given, each under a seed that depends on `seed` and the
    layer's name alone. However the model is cut, it starts from the same weights. What has a value keeps it.

    Raises:
        InvalidModel: a parameter or buffer on the meta device to which nothing gives a value.
    """
    model = parts.model
    own = {id(tensor) for tensor in tensors}
    states = layer_states(model)
    for name, tensor in unused_state(model).items():
        states.setdefault(name.rpartition(".")[0], {})[name] = tensor
    with without_weak_references(model.root):
        for layer, state in states.items():
            if any(tensor.is_meta and id(tensor) in own for tensor in state.values()):
                _initialize_layer(model.root, layer, state, seed, initialize)
        for tensor in _held(model.root, model.module):
            if id(tensor) not in own:
                if not tensor.is_meta:
                    _swap(tensor, torch.empty_like(tensor, device="meta"))
            elif tensor.device != device:
                _swap(tensor, tensor.detach().to(device))


def _held(*modules: nn.Module) -> list[Tensor]:
    """Every parameter and buffer once."""
    found = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return list({id(tensor): tensor for tensor in found}.values())


def layer_seed(seed: int, layer: str) -> int:
    """Returns the seed under which a layer draws its initial values."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{layer}".encode()).digest()[:7])


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
        _swap(tensor, _poisoned(tensor))
    written = {id(tensor) for tensor in unset.values()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(layer_seed(seed, layer))
        for module in _owners(root, layer, unset):
            with _kept(tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in written):
                for child in reversed(list(module.modules())):  # a parent's reset has the last word, as at its making
                    reset = reset_method(child)
                    if reset is not None:
                        reset()
                if initialize is not None:
                    initialize(module)
    for name, tensor in unset.items():
        if _is_poisoned(tensor):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise InvalidModel(
                f"{kind} '{name}' is on the meta device and neither the layer's reset_parameters() nor the model's "
                "initialize gives it a value: build the model on a real device, or set it there"
            )


def _owners(root: nn.Module, layer: str, unset: Iterable[str]) -> list[nn.Module]:
    """The layer's module, and those outside it that hold what the layer uses."""
    modules = dict(root.named_modules())
    path = layer.partition("#")[0]
    outside = (name.rpartition(".")[0] for name in unset if not name.startswith(f"{path}."))
    return [modules[name] for name in dict.fromkeys((path, *outside)) if name in modules]


@contextmanager
def _kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Gives tensors back the values that they had."""
    values = [(tensor, tensor.clone()) for tensor in tensors if not tensor.is_meta]
    yield
    for tensor, value in values:
        tensor.copy_(value)


def _poisoned(tensor: Tensor) -> Tensor:
    real = torch.empty_like(tensor, device="cpu")
    if real.is_floating_point() or real.is_complex():
        return real.fill_(float("nan"))
    return real.fill_(_UNSET if real.dtype == torch.int64 else 77)


def _is_poisoned(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    first = tensor.detach().reshape(-1)[0]
    return bool(first.isnan()) or bool(first == _UNSET if tensor.dtype == torch.int64 else _is_small_poison(first))


def _is_small_poison(value: Tensor) -> bool:
    return (
        not value.is_floating_point()
        and not value.is_complex()
        and bool(value == (True if value.dtype == torch.bool else 77))
    )


def _swap(tensor: Tensor, value: Tensor) -> None:
    """Gives `tensor` the storage of `value`; every reference to it, tied weights included, sees the new one."""
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
