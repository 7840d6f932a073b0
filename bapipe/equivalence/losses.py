"""Notices losses of which the mean over micro-batches is not the loss of the mini-batch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bapipe.equivalence.ignored_labels import (
    IGNORED_BY_TORCH,
    CodeLabels,
    holds_labels,
    labels_in_code,
    labels_that_stand_out,
    with_label,
)
from bapipe.equivalence.loss_state import state_of_loss
from bapipe.equivalence.outcome import Loss, Microbatch, trial
from bapipe.equivalence.sample_dims import BY_ROWS, OF_BATCH, SampleDim, Samples, sample_dims
from bapipe.equivalence.target_weights import WeightsAhead, mean_weights, sums_of_weights, weighted_loss
from bapipe.errors import InvalidModel
from bapipe.module_state.modes import evaluation_mode
from bapipe.torch_private.tensors import tree_map, tree_tensors


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


_KEEPS_VALUES = (
    "the loss keeps values from one call to the next, such as a running average, and is called for each micro-batch, "
    "so these values depend on the number of micro-batches: choose the rate of the average for micro-batches, or plan "
    "with one micro-batch"
)
"""Of a loss that is the mean over the halves of a batch as long as these values are the same."""


def _of_obstacle(obstacle: str) -> _Advice:
    return _Advice(
        f"it is a mean by weights, which must be known before the outputs are, but its code {obstacle}",
        "let it take any number of samples, use no values of outputs, and only numbers, tensors and small objects "
        "beside",
    )


def uncompared(obstacle: str) -> str:
    """Says that a loss could not be compared with that of parts of the samples, because of an obstacle."""
    return (
        f"the loss could not be compared with that of their halves, because {obstacle}: where it depends on "
        f"how a mini-batch is cut ({_OF_LOSS.reasons}), gradients are others than those of the whole mini-batch, "
        f"without a further word. If it does, {_OF_LOSS.remedy}"
    )


def of_whole(shape: Sequence[int]) -> str:
    """Says that a loss reads what a model computes of a whole micro-batch, in a tensor of that shape."""
    kind = "a number" if not len(shape) else f"a tensor of shape {tuple(shape)}"
    return (
        f"the loss reads {kind} that the model computes of a whole micro-batch, so training takes its mean over "
        "micro-batches: that is the one of the mini-batch if it is a mean over samples, and else training depends on "
        f"which samples share a micro-batch ({_OF_MODEL.reasons}), as profiling says. To train as on the whole "
        f"mini-batch, {_OF_MODEL.remedy}"
    )


def loss_over_parts(module: nn.Module, loss: Loss, batch: Microbatch) -> str | None:
    """Returns in which way the loss of a batch is not the mean over its halves; None if it is, or cannot be told.

    The halves are those of the model's output, so layers that mix samples, such as batch norm, do not count. Where it
    is not by rows, as if the model computes its loss itself, they are those of the inputs, in evaluation mode. A loss
    that reads the model's parameters is no function of the output either. What the loss keeps is put back.
    """
    state = state_of_loss(loss, module)
    with state.restored():
        return _over_parts(module, loss, batch, labels_in_code(state))


def _over_parts(module: nn.Module, loss: Loss, batch: Microbatch, labels: CodeLabels) -> str | None:
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
    num = len(batch.target)
    if num % 2:
        return None
    dims = _dims_of(module, batch, output)
    if dims is None or not all(where.is_own or where.is_constant for where in dims):
        guess = [BY_ROWS if tensor.dim() else OF_BATCH for tensor in tree_tensors(output)]
        return _model_over_parts(module, loss, batch, dims or guess, labels, _tolerance(output))
    ways, usual = [_unequal(Samples.of(output, dims, num))], (0, IGNORED_BY_TORCH)
    try:
        fault = loss_over_halves(loss, ways, batch.target, labels, usual)
        if fault is None or not _changes_what_it_keeps(loss, ways[0], batch.target):
            return fault
        forgetting = _forgetting(loss, module)
        return loss_over_halves(forgetting, ways, batch.target, labels, usual) or _KEEPS_VALUES
    except Exception:  # on half of the samples; what the first ones of a run show remains
        return None


def _changes_what_it_keeps(loss: Loss, samples: Samples, target: Tensor) -> bool:
    with torch.no_grad():
        one, other = (loss(samples.output(), target.clone()) for _ in range(2))
    return not torch.equal(one, other)


def _forgetting(loss: Loss, module: nn.Module) -> Loss:
    """Returns a loss that keeps nothing from one call to the next."""

    def forgetting(output: Any, target: Tensor) -> Tensor:
        with state_of_loss(loss, module).restored():
            return loss(output, target)

    return forgetting


def _dims_of(module: nn.Module, batch: Microbatch, output: Any) -> list[SampleDim] | None:
    """Returns where the tensors of a batch's output have its samples, by a forward of half of them; None if it fails.

    A model that takes other inputs beside samples is run on no half: then tensors are by rows, or that is not known.
    """
    num, found = len(batch.target), tree_tensors(output)
    if all(len(tensor) == num for tensor in batch.inputs):
        half = Microbatch(inputs=tuple(x[: num // 2] for x in batch.inputs), target=batch.target[: num // 2])
        with trial(module) as one, torch.no_grad():
            one.begin_forward(0)
            try:
                return sample_dims(found, tree_tensors(module(*half.copy().inputs)), num, num // 2)
            except Exception:  # whatever the model's own code raises for another number of samples
                pass
    return [BY_ROWS] * len(found) if is_by_rows(output, num) else None


def loss_over_halves(
    loss: Loss, ways: Sequence[Samples], target: Tensor, labels: CodeLabels, usual: Sequence[int] = ()
) -> str | None:
    """Returns what `loss_over_parts` does, of a model's output for some samples, an even number of them.

    The loss may change its state.

    Args:
        ways: the output in each way in which samples may share a dimension: in one of them it is the mean over halves,
            unless it is none.
        labels, usual: which it may ignore. The loss of targets with each of them is compared, too, and with those
            labels that stand out among the targets, where it takes them.

    Raises:
        Exception: whatever the loss raises for the target as it is.
    """
    for other, condition in _targets(target, labels, usual):
        try:
            fault = _fault_over_halves(loss, ways, other)
        except Exception:
            if other is target:
                raise
            continue  # it does not take such a label
        if fault is not None:
            return f"{condition}{fault}"
    return None


def _fault_over_halves(loss: Loss, ways: Sequence[Samples], target: Tensor) -> str | None:
    fault, half = None, len(target) // 2
    for way in ways:
        with torch.no_grad():
            whole = loss(way.output(), target.clone())  # which it may change
            halves = [way.select(range(half)), way.select(range(half, way.num))]
            parts, obstacle = _counted(loss, halves, target.clone().chunk(2))
        advice = _OF_LOSS if obstacle is None else _of_obstacle(obstacle)
        tolerance = max(_tolerance(list(way.tensors)), _tolerance(whole))
        fault = _fault(float(whole), parts, tolerance, advice)
        if fault is None:
            return None
    return fault


def _model_over_parts(
    module: nn.Module,
    loss: Loss,
    batch: Microbatch,
    dims: Sequence[SampleDim],
    labels: CodeLabels,
    tolerance: float,
) -> str | None:
    """Returns what `loss_over_parts` does, by running the model on halves of its inputs."""
    if any(len(tensor) != len(batch.target) for tensor in batch.inputs):
        return None

    def output(inputs: Sequence[Tensor], microbatch: int = 0) -> Any:
        with trial(module) as one, torch.no_grad(), evaluation_mode([module]):
            one.begin_forward(microbatch)
            return module(*Microbatch(inputs=tuple(inputs), target=batch.target).copy().inputs)

    by_target = (batch.inputs, list(_targets(batch.target, labels, (0, IGNORED_BY_TORCH))))
    by_input = ((inputs, [(batch.target, words)]) for inputs, words in _inputs_with_ignored(batch.inputs, labels))
    for inputs, targets in chain((by_target,), by_input):
        try:
            whole, again = output(inputs), output(inputs, 1)
            outputs = [output(half) for half in zip(*(tensor.chunk(2) for tensor in inputs), strict=True)]
        except Exception:  # an input that the model does not take, or one that needs gradients
            continue
        for target, condition in targets:
            try:
                with torch.no_grad():
                    values = [float(loss(_cloned(one), target.clone())) for one in (whole, again)]
                    halves = [Samples.of(_cloned(one), dims, len(target) // 2) for one in outputs]
                    parts, _ = _counted(loss, halves, target.clone().chunk(2))
            except Exception:  # a target that the loss does not take
                continue
            if values[0] != values[1] and isfinite(values[0]):  # it draws, and halves draw other numbers
                return None
            fault = _fault(values[0], parts, tolerance, _OF_MODEL)
            if fault is not None:
                return f"{condition}{fault}"
    return None


def _cloned(output: Any) -> Any:
    """Returns a copy of a model's output, which a loss may change."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output)


def _inputs_with_ignored(inputs: tuple[Tensor, ...], labels: CodeLabels) -> Iterator[tuple[tuple[Tensor, ...], str]]:
    """Yields inputs of which one that holds integers has, in the first half, some that may be ignored.

    With each comes what an answer for it begins with.
    """
    for i, tensor in enumerate(inputs):
        if not holds_labels(tensor) or tensor.dim() < 2:  # a sample whose only label is ignored is of no use
            continue
        for other, value, _ in with_label(tensor, _to_try(tensor, labels, (IGNORED_BY_TORCH, -1))):
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
    return all(tensor.dim() > 0 and len(tensor) == num_rows for tensor in tree_tensors(output))


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


def _counted(loss: Loss, halves: Sequence[Samples], targets: Sequence[Tensor]) -> tuple[list[float], str | None]:
    """Returns the losses of halves as training counts them, of which the mean is that of both.

    Also what the loss does, if it is a mean by weights that it does not let be known before it is computed.
    """
    first = halves[0]
    ahead = WeightsAhead(
        loss, lambda given, target: loss(first.output(given), target), first.tensors, first.dims, targets[0].device
    )
    with ahead.running():
        known = [ahead.of(target) for target in targets]
    weights = mean_weights(sums_of_weights(known, targets[0].device), len(targets))
    found = [weighted_loss(loss, half.output(), target, weights) for half, target in zip(halves, targets, strict=True)]
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


def _unequal(samples: Samples) -> Samples:
    """Returns an output of which no samples are equal, as those of equal inputs are: their means would be, too."""

    def scaled(tensor: Tensor, where: SampleDim) -> Tensor:
        if where.dim is None or not tensor.is_floating_point():
            return tensor
        factors = torch.linspace(1, 0.5, samples.num, dtype=tensor.dtype, device=tensor.device)
        return tensor * factors.view(-1, *[1] * (tensor.dim() - where.dim - 1))

    pairs = zip(samples.tensors, samples.dims, strict=True)
    return replace(samples, tensors=tuple(scaled(*pair) for pair in pairs))


def _targets(target: Tensor, labels: CodeLabels, usual: Sequence[int]) -> Iterator[tuple[Tensor, str]]:
    """Yields the target, and, if it holds integers, some with entries of the first half that may be ignored.

    With each comes what an answer for it begins with.
    """
    yield target, ""
    if holds_labels(target):
        for other, value, is_held in with_label(target, _to_try(target, labels, usual)):
            yield other, "" if is_held else f"if some targets are {value}, "


def _to_try(tensor: Tensor, labels: CodeLabels, usual: Sequence[int]) -> list[int]:
    return [*labels_that_stand_out(tensor), *usual, *labels.that_may_be_among(tensor)]


def _tolerance(output: Any) -> float:
    half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tree_tensors(output))
    return 5e-2 if half else 1e-4
