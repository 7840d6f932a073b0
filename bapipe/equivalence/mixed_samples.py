"""Notices models whose output for a sample depends on the other samples of its batch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bapipe.equivalence.outcome import Microbatch, set_up_at_first, trial
from bapipe.equivalence.sample_dims import sample_dim
from bapipe.module_state.modes import evaluation_mode
from bapipe.module_state.python_state import same_tensor
from bapipe.torch_private.tensors import tree_tensors

_TOLERANCE = {torch.float16: 0.1, torch.bfloat16: 0.1}
"""Of differences, relative to the largest value: kernels add up in another order in a batch of another size."""

_TOLERANCE_ELSE = 1e-3

_MIXES = (
    "the model's output for a sample depends on the samples that share its micro-batch or come before it, so training "
    "depends on the size of micro-batches (as where the first dimension of an input is not that of the samples, "
    "sequences are padded to the longest of a batch, or state is kept from one batch to the next)"
)

_SET_UP_BY_FIRST = (
    "the model's first forward does more than later ones, as setting values by the first samples, which would be those "
    "of one micro-batch: call the model once on samples where it is made, so that this is done"
)


def outputs_over_parts(module: nn.Module, batch: Microbatch) -> str | None:
    """Returns that a batch's outputs are not those of its halves, and why; None if they are, or it cannot be told.

    The model is in evaluation mode, where batch norm and dropout are the same for each sample. The halves come one
    after another, as micro-batches do, so state that a forward leaves for the next one counts as well. Whether the
    first samples set values is tried in both modes.
    """
    if len(batch.target) % 2 or any(len(tensor) != len(batch.target) for tensor in batch.inputs):
        return None
    one, other = _halves(batch)
    if _sets_by_first(module, one, other, [module]) or _sets_by_first(module, one, other, []):
        return _SET_UP_BY_FIRST
    if not _mixes(module, batch):
        return None
    return _MIXES if _mixes(module, batch, first=(batch.inputs,)) else _SET_UP_BY_FIRST


def _halves(batch: Microbatch) -> tuple[Microbatch, Microbatch]:
    pairs = [tensor.chunk(2) for tensor in (*batch.inputs, batch.target)]
    one, other = (Microbatch(inputs=tensors[:-1], target=tensors[-1]) for tensors in zip(*pairs, strict=True))
    return one, other


def _sets_by_first(module: nn.Module, one: Microbatch, other: Microbatch, evaluated: Sequence[nn.Module]) -> bool:
    """Returns whether a first forward sets a tensor by its samples, for good; False if it cannot be told.

    In either order, the second of two different batches leaves the tensor alone, which so is no maximum of all samples.
    A table that the first forward makes has the same values in either order.
    """
    try:
        with evaluation_mode(evaluated):
            by_one = set_up_at_first(module, one, other)
            by_other = set_up_at_first(module, other, one) if by_one else {}
    except Exception:  # whatever the model's own code raises
        return False
    return any(not same_tensor(by_one[name], by_other[name]) for name in by_one.keys() & by_other.keys())


def _mixes(module: nn.Module, batch: Microbatch, first: tuple[tuple[Tensor, ...], ...] = ()) -> bool:
    """Returns whether a batch's outputs are not those of its halves; False if it cannot be told.

    `first` are batches whose forwards come before.
    """
    num_rows = len(batch.target)
    halves = tuple(half.inputs for half in _halves(batch))
    try:
        whole = _outputs(module, *first, batch.inputs)[-1]
        again = _outputs(module, *first, batch.inputs, microbatch=1)[-1]  # where it draws, with other random numbers
        one, other = _outputs(module, *first, *halves)[-2:]
        found = list(zip(whole, one, other, strict=True))
    except Exception:  # whatever the model's own code raises; profiling it says more
        return False
    if not _are_close(whole, again):
        return False
    dims = [sample_dim(all_rows.shape, a.shape, num_rows, num_rows // 2) for all_rows, a, _ in found]
    of_samples = [(*tensors, where.dim) for tensors, where in zip(found, dims, strict=True) if where.is_own]
    joined = [torch.cat([a, b], dim) for _, a, b, dim in of_samples if a.shape == b.shape and dim is not None]
    return len(joined) < len(of_samples) or not _are_close([all_rows for all_rows, *_ in of_samples], joined)


def _outputs(module: nn.Module, *batches: tuple[Tensor, ...], microbatch: int = 0) -> list[list[Tensor]]:
    """Returns the tensors that the model returns for each of some batches, one after another."""
    with trial(module) as one, torch.no_grad(), evaluation_mode([module]):
        found = []
        for inputs in batches:
            one.begin_forward(microbatch)
            found.append(tree_tensors(module(*(tensor.clone() for tensor in inputs))))
        return found


def _are_close(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    """Returns whether floating-point values are equal but for rounding, or some are not finite."""
    for a, b in zip(expected, found, strict=True):
        if a.is_floating_point() and a.numel():
            tolerance = _TOLERANCE.get(a.dtype, _TOLERANCE_ELSE) * float(a.detach().abs().max())
            if a.shape != b.shape or float((a - b).detach().abs().max()) > tolerance:
                return False
    return True
