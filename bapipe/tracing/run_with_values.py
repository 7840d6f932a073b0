"""Runs a layer on values, to learn the shapes of its results where its code needs values."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.torch_private import without_fake_tensors
from bapipe.tracing.nested_tensors import map_tensors, tensors_in


def run_with_values(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Returns tensors without values, of the shapes that a copy of a module returns for some values."""
    with without_fake_tensors(), torch.no_grad():
        result = copy.deepcopy(module)(*map_tensors(args, _with_values), **map_tensors(kwargs, _with_values))
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    trained = trained or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs))))
    return map_tensors(result, lambda tensor: _without_values(tensor, trained))


def _with_values(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.rand(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _without_values(tensor: Tensor, trained: bool) -> Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_(trained and (tensor.is_floating_point() or tensor.is_complex()))
