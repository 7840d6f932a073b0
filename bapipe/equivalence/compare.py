"""Compares two outcomes, up to rounding."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.equivalence.outcome import TRAINING, Conditions, Loss, Microbatch, Outcome, run_original
from bapipe.module_state.python_state import values_restored
from bapipe.torch_device import CPU
from bapipe.torch_private.tensors import DispatchMode

_ROUNDING = 64
"""Differences of this many rounding units of a tensor's largest value are rounding, in any model."""

_HALF_ROUNDING = 4
"""The same for types of 16 bits, of which 64 units would be half of the value."""

_NOISE = 16
"""So often the difference that rounding units in the parameters make is rounding, too."""

_PERTURBATION = 4
"""By how many rounding units the parameters are changed to see what rounding may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A value that differs.

    Attributes:
        kind: "loss", "gradient", "buffer" or "counter"; parameters that a forward changes are buffers here.
        name: of the parameter, buffer or attribute; of a loss, the number of the micro-batch.
        size: the largest difference of an element, relative to the largest value.
        missing: "original" or "split" if that one has no such value at all.
    """

    kind: str
    name: str
    size: float
    missing: str | None = None

    def __str__(self) -> str:
        if self.kind == "loss":
            return f"the loss of micro-batch {self.name} differs by {self.size:.2g} of its value"
        if self.kind == "counter":
            return f"the attribute '{self.name}', which counts calls, differs"
        if self.missing is not None:
            return f"the {self.kind} of '{self.name}' is missing in the {self.missing} model"
        return f"the {self.kind} of '{self.name}' differs by {self.size:.2g} of its largest value"


def mismatches(
    original: Outcome, split: Outcome, conditions: Conditions, noise: Outcome | None = None
) -> list[Mismatch]:
    """Returns what differs by more than rounding.

    Args:
        noise: another outcome of the original, with what rounding units change in it: see `perturbed`.
    """
    found = []
    for kind, name, wanted, got, noisy in _pairs(original, split, noise):
        size = _difference(wanted, got)
        allowed = _rounding(wanted, conditions)
        if noisy is not None:
            allowed = max(allowed, _NOISE * _difference(wanted, noisy))
        if size > allowed:
            missing = "original" if wanted is None else "split" if got is None else None
            found.append(Mismatch(kind=kind, name=name, size=size, missing=missing))
    counters = original.counters.items()
    found += [
        Mismatch(kind="counter", name=name, size=1.0) for name, value in counters if split.counters.get(name) != value
    ]
    return found


def repeats(original: Outcome, again: Outcome) -> bool:
    """Returns whether two runs of the original have the same losses, up to what kernels that race may change."""
    pairs = zip(original.losses, again.losses, strict=True)
    return all(_difference(a, b) <= max(1e-4, _rounding(a, TRAINING)) for a, b in pairs)


def perturbed(module: nn.Module, loss: Loss, microbatches: Sequence[Microbatch], conditions: Conditions) -> Outcome:
    """Returns the outcome of the original with parameters, inputs and casts to float32 changed by rounding units.

    It shows how far apart two correct computations may be: the order of sums, and of kernels, is free.
    """
    generator = torch.Generator().manual_seed(0)
    with values_restored(module.parameters()):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(_shaken(parameter, generator, conditions))
        shaken = [
            Microbatch(inputs=tuple(_shaken(tensor, generator, conditions) for tensor in one.inputs), target=one.target)
            for one in microbatches
        ]
        with _CastsShaken(generator):
            return run_original(module, loss, shaken, conditions)


class _CastsShaken(DispatchMode):  # type: ignore[no-untyped-call]
    """Changes what is cast from float64 to float32, forward and backward, by rounding units of float32.

    What rounding units of float64 change in a part that computes in float32 is mostly lost in the cast to it, while
    that part rounds as any in float32. Parts in 16 bits need no such change: torch sums these in float32, so that the
    order of a sum hardly shows.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ != "_to_copy" or result.layout is not torch.strided:
            return result
        if (args[0].dtype, result.dtype) == (torch.float64, torch.float32):
            result.copy_(_shaken(result, self._generator, TRAINING))
        return result


def _shaken(tensor: Tensor, generator: torch.Generator, conditions: Conditions) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator, device=CPU).to(tensor.device) * 2 - 1
    # In float64: the factor would be 1 in float32, which integers become, if the tensor has more digits than that.
    factor = 1 + _PERTURBATION * _unit(tensor, conditions) * signs.double()
    return (tensor * factor).to(tensor.dtype)


def _pairs(
    original: Outcome, split: Outcome, noise: Outcome | None
) -> Iterator[tuple[str, str, Tensor | None, Tensor | None, Tensor | None]]:
    """Yields (kind, name, original, split, noise) of every value; None for a value that there is not."""
    for index, wanted in enumerate(original.losses):
        yield "loss", str(index), wanted, split.losses[index], None if noise is None else noise.losses[index]
    kinds: list[tuple[str, Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]]] = [
        ("gradient", original.gradients, split.gradients, {} if noise is None else noise.gradients),
        ("buffer", original.state, split.state, {} if noise is None else noise.state),
    ]
    for kind, wanted_values, got_values, noisy_values in kinds:
        for name in dict.fromkeys((*wanted_values, *got_values)):
            yield kind, name, wanted_values.get(name), got_values.get(name), noisy_values.get(name)


def _difference(wanted: Tensor | None, got: Tensor | None) -> float:
    """Returns the largest difference of an element, relative to the largest value; no value is like zeros."""
    if wanted is None or got is None:
        given = got if wanted is None else wanted
        return 0.0 if given is None or not bool(given.count_nonzero()) else 1.0
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return float("inf")
    if wanted.is_sparse or got.is_sparse:
        wanted, got = wanted.to_dense(), got.to_dense()
    if torch.equal(wanted, got):
        return 0.0
    a, b = comparable(wanted), comparable(got)
    if not torch.equal(_not_finite(a), _not_finite(b)):
        return float("inf")
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    return float((a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max()).clamp(min=1e-300))


def _not_finite(values: Tensor) -> Tensor:
    """Returns 1 where a value is inf, -1 for -inf, 2 for NaN, and 0 for finite ones."""
    return values.where(~values.isfinite(), 0.0).nan_to_num(nan=2, posinf=1, neginf=-1)


def comparable(tensor: Tensor) -> Tensor:
    """Returns a tensor's values in float64, of complex ones the real and imaginary parts; without its graph."""
    values = tensor.detach()
    return torch.view_as_real(values.resolve_conj()).double() if values.is_complex() else values.double()


def _rounding(tensor: Tensor | None, conditions: Conditions) -> float:
    """Returns the relative difference that counts as rounding for a tensor."""
    unit = _unit(tensor, conditions)
    return unit * (_ROUNDING if unit < 1e-5 else _HALF_ROUNDING)


def _unit(tensor: Tensor | None, conditions: Conditions) -> float:
    """Returns the relative rounding unit of a tensor's type, or of the narrower one of autocast; 0 for integers."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    types = (tensor.dtype,) if conditions.autocast is None else (tensor.dtype, conditions.autocast)
    return max(torch.finfo(dtype).eps for dtype in types)
