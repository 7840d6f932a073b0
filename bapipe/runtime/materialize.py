"""Real storage and initial values for the layers of some stages, and none for the rest."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.runtime.split import Split, layer_state

_UNSET = -(2**40) - 7
"""Fills integers before initialisation, as NaN does floats, so that what no one sets is found."""


def materialize(
    parts: Split,
    stages: Iterable[int],
    device: torch.device,
    seed: int,
    initialize: Callable[[nn.Module], None] | None = None,
) -> None:
    """Puts the parameters and buffers of some stages on a device, in place, and all others on the meta device.

    A layer that is on the meta device takes the values of `reset_parameters()`, and then of `initialize(module)` where
    given, each under a seed that depends on `seed` and the layer's name alone: however the model is cut, it starts
    from the same weights. A layer that has values keeps them.

    Raises:
        InvalidModel: a parameter or buffer on the meta device to which nothing gives a value.
    """
    model = parts.model
    own: dict[int, Tensor] = {}
    with _no_weak_references(model.module):
        for name in (name for s in stages for name in parts.stages[s].layers):
            state = layer_state(model, name)
            if any(tensor.is_meta for tensor in state.values()):
                _initialize_layer(model.module, name, state, seed, initialize)
            own |= {id(tensor): tensor for tensor in state.values()}
        for tensor in own.values():
            if tensor.device != device:
                _swap(tensor, tensor.detach().to(device))
        for tensor in (*model.module.parameters(), *model.module.buffers()):
            if id(tensor) not in own and not tensor.is_meta:
                _swap(tensor, torch.empty_like(tensor, device="meta"))


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
    path = layer.partition("#")[0]
    unset = {name: tensor for name, tensor in state.items() if tensor.is_meta}
    for tensor in unset.values():
        _swap(tensor, _poisoned(tensor))
    module = root.get_submodule(path)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(layer_seed(seed, layer))
        for child in reversed(list(module.modules())):  # a parent's reset has the last word, as in its constructor
            reset = getattr(child, "reset_parameters", None) or getattr(child, "_reset_parameters", None)
            if callable(reset):
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


@contextmanager
def _no_weak_references(root: nn.Module) -> Iterator[None]:
    """Takes from recurrent layers the weak references to their parameters, which swapping refuses, and renews them."""
    recurrent = [module for module in root.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    yield
    for module in recurrent:
        module._init_flat_weights()


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
