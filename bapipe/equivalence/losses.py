"""Notices losses of which the mean over micro-batches is not the loss of the mini-batch."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bapipe.equivalence.loss_state import state_of_loss
from bapipe.equivalence.outcome import Loss, Microbatch, trial
from bapipe.equivalence.target_weights import WeightsAhead, mean_weights, sums_of_weights, weighted_loss
from bapipe.errors import InvalidModel
from bapipe.module_state.modes import evaluation_mode
from bapipe.module_state.python_random import all_generators_restored
from bapipe.torch_private.tensors import tree_flatten, tree_map, tree_unflatten

_IGNORED = -100
"""What torch's cross entropy ignores by default."""


class _Advice(NamedTuple):
    """Why a loss may depend on how a batch is cut, and what to do."""

    reasons: str
    remedy: str


_OF_LOSS = _Advice(
    "as with a mean by a mask or by weights of your own, or losses that compare samples",
    "return `bapipe.weighted_mean(losses, weights)`, or the mean over all samples; or plan with one micro-batch",
)

_OF_MODEL = _Advice(
    "as with a mean over labels of which some are ignored, the balance of experts, or losses that compare samples",
    "if it is a mean, let the model return what it is computed from, and compute it in the loss, with the labels as "
    "target; or plan with one micro-batch",
)


def uncounted(obstacle: str) -> str:
    """Says that micro-batches count alike though the loss weights them, because its code has an obstacle."""
    advice = _of_obstacle(obstacle)
    return f"micro-batches count alike, but the loss weights them ({advice.reasons}): {advice.remedy}"


def _of_obstacle(obstacle: str) -> _Advice:
    return _Advice(
        f"it is a mean by weights, which must be known before the outputs are, but its code {obstacle}",
        "let it use no values of outputs, and only numbers, tensors and small objects beside",
    )


def loss_over_parts(module: nn.Module, loss: Loss, batch: Microbatch) -> str | None:
    """Returns in which way the loss of a batch is not the mean over its halves; None if it is, or cannot be told.

    The halves are those of the model's output, so layers that mix samples, such as batch norm, do not count. Where it
    is not by rows, as if the model computes its loss itself, they are those of the inputs, in evaluation mode. A loss
    that reads the model's parameters is no function of the output either. What the loss keeps is put back.
    """
    with state_of_loss(loss, module).restored():
        return _over_parts(module, loss, batch)


def _over_parts(module: nn.Module, loss: Loss, batch: Microbatch) -> str | None:
    with trial(module) as one, torch.no_grad():
        one.begin_forward(0)
        try:
            output = module(*batch.copy().inputs)
        except Exception:  # whatever the model's own code raises; profiling it says more
            return None
        try:
            read = _parameters_read(module, loss, output, batch.target)
        except Exception:  # a loss that fails says so when it is measured
            return None
    if read:
        return (
            f"the loss reads parameter '{read[0]}' of the model, which the rank that computes the loss has only if it "
            "is in its stage: let the model return that term, or use the optimizer's weight decay"
        )
    if len(batch.target) % 2:
        return None
    if not is_by_rows(output, len(batch.target)):
        return _model_over_parts(module, loss, batch, _tolerance(output))
    output = _with_unequal_rows(output, len(batch.target))
    for target, condition in _targets(loss, batch.target):
        try:
            fault = _fault_over_halves(loss, output, target)
        except Exception:  # a target that the loss does not take
            continue
        if fault is not None:
            return f"{condition}{fault}"
    return None


def loss_over_halves(loss: Loss, output: Any, target: Tensor) -> str | None:
    """Returns what `loss_over_parts` does, of an output for real data, which says most.

    None also if not all of it is by rows, there is a single one, or the loss draws random numbers or fails on fewer.
    The loss may change its state.
    """
    num = len(target) // 2 * 2
    if num == 0 or not is_by_rows(output, len(target)):
        return None
    even = tree_map(lambda leaf: leaf.detach()[:num] if isinstance(leaf, Tensor) else leaf, output)
    with torch.no_grad(), all_generators_restored(target.device):
        try:
            values = [loss(even, target[:num].clone()) for _ in range(2)]
            return _fault_over_halves(loss, even, target[:num]) if torch.equal(*values) else None
        except Exception:  # whatever the code of the loss raises
            return None


def _fault_over_halves(loss: Loss, output: Any, target: Tensor) -> str | None:
    with torch.no_grad():
        whole = loss(output, target.clone())  # which it may change
        parts, obstacle = _counted(loss, _halves(output), target.clone().chunk(2))
    advice = _OF_LOSS if obstacle is None else _of_obstacle(obstacle)
    return _fault(float(whole), parts, max(_tolerance(output), _tolerance(whole)), advice)


def _model_over_parts(module: nn.Module, loss: Loss, batch: Microbatch, tolerance: float) -> str | None:
    """Returns what `loss_over_parts` does, by running the model on halves of its inputs."""
    if any(len(tensor) != len(batch.target) for tensor in batch.inputs):
        return None

    def output(inputs: Sequence[Tensor], microbatch: int = 0) -> Any:
        with trial(module) as one, torch.no_grad(), evaluation_mode([module]):
            one.begin_forward(microbatch)
            return module(*Microbatch(inputs=tuple(inputs), target=batch.target).copy().inputs)

    targets = ((batch.inputs, target, condition) for target, condition in _targets(loss, batch.target))
    labels = ((inputs, batch.target, condition) for inputs, condition in _inputs_with_ignored(batch.inputs))
    for inputs, target, condition in chain(targets, labels):
        try:
            with torch.no_grad():
                whole, again = (float(loss(output(inputs, seed), target.clone())) for seed in (0, 1))
                halves = [output(half) for half in zip(*(tensor.chunk(2) for tensor in inputs), strict=True)]
                parts, _ = _counted(loss, halves, target.clone().chunk(2))
        except Exception:  # an input that the model does not take, or one that needs gradients
            continue
        if whole != again:  # it draws, and halves draw other numbers
            return None
        fault = _fault(whole, parts, tolerance, _OF_MODEL)
        if fault is not None:
            return f"{condition}{fault}"
    return None


def _inputs_with_ignored(inputs: tuple[Tensor, ...]) -> Iterator[tuple[tuple[Tensor, ...], str]]:
    """Yields inputs of which one that holds integers has, in the first half, some that may be ignored.

    With each comes what an answer for it begins with.
    """
    for i, tensor in enumerate(inputs):
        is_of_words = _holds_labels(tensor) and tensor.dim() > 1  # a sample whose only label is ignored is of no use
        for other, value in _with_ignored(tensor, (int(tensor.min()), _IGNORED, -1) if is_of_words else ()):
            yield (*inputs[:i], other, *inputs[i + 1 :]), f"if some labels among the inputs are {value}, "


def check_no_parameters(loss: Loss) -> None:
    """Raises InvalidModel if a loss is a class, or has parameters to train: optimizers get those of the stages."""
    if isinstance(loss, type):
        raise InvalidModel(f"the loss is the class {loss.__name__}: want an object of it, such as {loss.__name__}()")
    own = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    trained = [name for name, parameter in own if parameter.requires_grad]
    if trained:
        raise InvalidModel(
            f"the loss has parameters to train, such as '{trained[0]}', but only those of the model are trained: make "
            "the part that has them a module of the model, which returns what it computes, or freeze them "
            "(`requires_grad_(False)`)"
        )


def is_by_rows(output: Any, num_rows: int) -> bool:
    """Returns whether the first dimension of all tensors of an output is that of the samples."""
    tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
    return all(tensor.dim() > 0 and len(tensor) == num_rows for tensor in tensors)


def _parameters_read(module: nn.Module, loss: Loss, output: Any, target: Tensor) -> list[str]:
    """Returns the names of the parameters that the loss depends on beside the model's output, which has no graph."""
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    apart = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)  # it may be a parameter itself
    with torch.enable_grad():
        value = loss(apart, target.clone())
        if not value.requires_grad:
            return []
        gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    return [name for name, gradient in zip(named, gradients, strict=True) if gradient is not None]


def _counted(loss: Loss, outputs: Sequence[Any], targets: Sequence[Tensor]) -> tuple[list[float], str | None]:
    """Returns the losses of halves as training counts them, of which the mean is that of both.

    Also what the loss does, if it is a mean by weights that it does not let be known before it is computed.
    """
    leaves, spec = tree_flatten(outputs[0])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def computed(given: Iterable[Tensor], target: Tensor) -> Tensor:
        rest = iter(given)
        output = tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        return loss(output, target)

    ahead = WeightsAhead(loss, computed, tensors, targets[0].device)
    with ahead.running():
        known = [ahead.of(target) for target in targets]
    weights = mean_weights(sums_of_weights(known, targets[0].device), len(targets))
    found = [weighted_loss(loss, output, target, weights) for output, target in zip(outputs, targets, strict=True)]
    is_mean = any(one.weights for one in found)
    return [float(one.value) for one in found], ahead.obstacle if is_mean and None in known else None


def _fault(whole: float, parts: list[float], tolerance: float, advice: _Advice) -> str | None:
    mean, size = sum(parts) / 2, max(abs(whole), *map(abs, parts))
    if abs(whole - mean) <= tolerance * size or not isfinite(whole):
        return None
    if abs(whole - sum(parts)) <= tolerance * size and advice in (_OF_LOSS, _OF_MODEL):
        return (
            "the loss is a sum over the batch, so training by micro-batches divides it by their number: divide by the "
            "number of samples instead"
        )
    return (
        f"the loss of a batch is {whole:.4g}, and the mean of its halves {mean:.4g}, so training depends on which "
        f"samples share a micro-batch ({advice.reasons}): {advice.remedy}"
    )


def _with_unequal_rows(output: Any, num_rows: int) -> Any:
    """Returns a model's output of which no rows are equal, as those of equal inputs are: their means would be, too."""

    def scaled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != num_rows or not leaf.is_floating_point():
            return leaf
        factors = torch.linspace(1, 0.5, num_rows, dtype=leaf.dtype, device=leaf.device)
        return leaf.detach() * factors.view(-1, *[1] * (leaf.dim() - 1))

    return tree_map(scaled, output)


def _halves(output: Any) -> list[Any]:
    """Returns a model's output for each half of the rows."""

    def half(index: int, leaf: Any) -> Any:
        return leaf.chunk(2)[index] if isinstance(leaf, Tensor) else leaf

    return [tree_map(partial(half, index), output) for index in (0, 1)]


def _targets(loss: Loss, target: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Yields the target, and, if it holds integers, some with entries of the first half that may be ignored.

    With each comes what an answer for it begins with.
    """
    yield target, ""
    if not _holds_labels(target):
        return
    settings = loss.keywords if isinstance(loss, partial) else vars(loss) if isinstance(loss, nn.Module) else {}
    # -100 is what torch ignores by default, whether or not there is such an entry.
    values = (int(target.min()), 0, settings.get("ignore_index", _IGNORED), _IGNORED)
    for other, value in _with_ignored(target, values):
        yield other, f"if some targets are {_IGNORED}, " if value == _IGNORED else ""


def _holds_labels(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool) and tensor.numel() > 0


def _with_ignored(tensor: Tensor, values: Iterable[int]) -> Iterator[tuple[Tensor, int]]:
    """Yields a tensor with each of some values in its first row, and that value.

    On a GPU only with those it holds: a kernel that refuses an index ends all use of the GPU by this process.
    """
    for value in dict.fromkeys(values):
        if tensor.device.type == "cpu" or bool((tensor == value).any()):
            other = tensor.clone()
            other[0] = value
            yield other, value


def _tolerance(output: Any) -> float:
    half = any(
        isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) for leaf in tree_flatten(output)[0]
    )
    return 5e-2 if half else 1e-4
