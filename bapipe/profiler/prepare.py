"""Prepares a module for measuring: checks, training mode and memory format, and batches of its examples."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError, InvalidModel
from bapipe.formats.settings import Settings
from bapipe.module_state.modes import enter_training_mode, idle_dropout
from bapipe.module_state.python_random import all_generators_restored
from bapipe.module_state.python_state import state_restored
from bapipe.module_state.unregistered import unregistered_parameters
from bapipe.printable import shortened
from bapipe.torch_device import describe
from bapipe.torch_settings import tf32
from bapipe.tracing.sizes import repeat_to_batch

_log = logging.getLogger(__name__)


def check_examples(inputs: Sequence[Tensor], target: object) -> None:
    """Raises InvalidModel unless all examples are tensors with at least one sample."""
    named = [(f"input {index}", example) for index, example in enumerate(inputs)]
    for name, example in (*named, ("the target", target)):
        if not isinstance(example, Tensor):
            advice = (
                "pack several into one, such as torch.cat([labels[:, None], boxes], 1), which the loss takes apart"
                if example is target
                else "keep other values inside the module"
            )
            raise InvalidModel(
                f"{name} is {shortened(repr(example))} ({type(example).__name__}); examples must be tensors, batch "
                f"first: {advice}"
            )
        if example.dim() == 0 or len(example) == 0:
            raise InvalidModel(
                f"{name} has shape {tuple(example.shape)}: want an example of one sample or more, batch first"
            )


def check_trainable(module: nn.Module) -> None:
    """Raises InvalidModel if a module is on the meta device, or has nothing to train."""
    if any(parameter.is_meta for parameter in module.parameters()):
        raise InvalidModel(f"{type(module).__name__} is on the meta device, so it cannot run: build it on a real one")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InvalidModel(f"{type(module).__name__} has no parameter to train: set requires_grad on those to train")


def fits_on_device(module: nn.Module, device: torch.device, copies: int = 2) -> bool:
    """Returns whether the device has memory for some copies of the parameters; 2 are parameters and their gradients.

    A CPU has to have it for one more: the values that `prepared` puts back.
    """
    copies += device.type == "cpu"
    return copies * sum(parameter.nbytes for parameter in module.parameters()) < describe(device).memory_bytes


@contextmanager
def prepared(module: nn.Module, device: torch.device, settings: Settings, *, move: bool = True) -> Iterator[None]:
    """Puts the module in training mode without gradients; restores its state, global generators and TF32 afterwards.

    If `move`, it also is on the device meanwhile, and its parameters get their values back. Else whoever runs its
    layers puts those back (`run_layers`): of a model that barely fits in memory there can be no copy.
    """
    home = next(module.parameters()).device
    strides = [(parameter, parameter.stride()) for parameter in module.parameters()]
    with (
        state_restored(module, parameters=move),
        tf32(settings.tf32),
        all_generators_restored(),
    ):
        if move:
            module.to(device)
        enter_training_mode(module)
        for fault in (idle_dropout(module), unregistered_parameters(module)):
            if fault is not None:
                _log.warning("%s", fault)
        if settings.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        module.zero_grad()
        try:
            yield
        finally:
            module.zero_grad()
            if move:
                module.to(home)
            _restore_strides(strides)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # for the ranks that may follow, in processes of their own


def _restore_strides(strides: Iterable[tuple[nn.Parameter, tuple[int, ...]]]) -> None:
    for parameter, stride in strides:
        if parameter.stride() != stride:
            restored = torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device=parameter.device)
            parameter.data = restored.copy_(parameter.data)


def batch_on_device(examples: Sequence[Tensor], size: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns `size` samples on the device, the examples repeated as often as needed.

    Raises:
        BapipeError: there is not enough memory for them.
    """
    try:
        return tuple(repeat_to_batch(example, size, device) for example in examples)
    except RuntimeError as error:
        raise BapipeError(
            f"no memory for a batch of {size} samples: measure smaller `microbatch_sizes` "
            f"({shortened(str(error), 100)})"
        ) from error
