"""Checks that a rank computes with the settings that the plan's profile was measured with."""

from collections.abc import Iterable, Iterator
from typing import Literal, cast

import torch
from msgspec import UNSET, structs
from torch import nn, optim

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.formats.settings import Settings, check_same, check_same_optimizer
from bapipe.optimizers import rule_of
from bapipe.runtime.optimizer import TORCH_OPTIMIZERS
from bapipe.torch_device import dtype_name


def check_autocast(autocast: object) -> None:
    """Raises BapipeError unless `autocast` is torch.bfloat16, torch.float16, or None for no autocast."""
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise BapipeError(f"`autocast` is {autocast!r}: want torch.bfloat16, torch.float16 or None")


def check_settings(plan: Plan, module: nn.Module, device: torch.device, autocast: torch.dtype | None) -> None:
    """Raises BapipeError if the plan's profile was measured with other settings than this process computes with.

    The memory format is compared if weights of the module show it, the number of threads on a CPU. TF32 is not
    compared: each step of a pipeline sets it as in the plan.
    """
    if plan.settings is UNSET:
        return
    planned = plan.settings
    here = structs.replace(
        planned,
        dtype=next((dtype_name(p.dtype) for p in module.parameters()), planned.dtype),
        autocast=None if autocast is None else cast(Literal["bfloat16", "float16"], dtype_name(autocast)),
        channels_last=next(_is_channels_last(module), planned.channels_last),
    )
    check_same(planned, here)
    if device.type == "cpu":
        here = structs.replace(planned, threads=torch.get_num_threads())
        check_same(planned, here, f"call torch.set_num_threads({planned.threads}) before it is built, or ")


def check_optimizers(plan: Plan, optimizers: Iterable[optim.Optimizer]) -> None:
    """Raises BapipeError if the plan's profile was measured with another optimizer.

    Optimizers without a name in profiles are not compared.
    """
    if plan.settings is UNSET:
        return
    for optimizer in optimizers:
        check_same_optimizer(plan.settings, _rule(optimizer, plan.settings), "let `optimizer` make the plan's, or ")


def _rule(optimizer: optim.Optimizer, planned: Settings) -> str:
    name = next((name for name, kind in TORCH_OPTIMIZERS.items() if kind is type(optimizer)), "")
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return rule_of(name, momentum=momentum) or planned.optimizer


def _is_channels_last(module: nn.Module) -> Iterator[bool]:
    """Yields whether weights of convolutions are in channels-last format, for each weight whose strides show it."""
    for p in module.parameters():
        last = p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last)
        if p.dim() == 4 and last is not p.is_contiguous():
            yield last
