"""Holds a traced and split model to the original: same loss, gradients and changed buffers on a few samples."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bapipe.equivalence.cause import cause_in_loss, likely_cause, own_code
from bapipe.equivalence.communication import ForwardCommunicates
from bapipe.equivalence.compare import Mismatch, mismatches, perturbed, repeats
from bapipe.equivalence.growing_collections import growing_collection
from bapipe.equivalence.locate import DifferenceAt, first_difference
from bapipe.equivalence.loss_state import state_of_loss
from bapipe.equivalence.outcome import (
    TRAINING,
    Conditions,
    Loss,
    LossFailed,
    Microbatch,
    Outcome,
    reads_what_forwards_leave,
    run_original,
    set_up_at_first,
)
from bapipe.equivalence.stage_pass import Stage, StageFailed
from bapipe.equivalence.stages import run_finest_stages, run_stages
from bapipe.errors import InvalidModel, first_line, root_cause
from bapipe.formats.profile import LOSS
from bapipe.module_state.code_state import iterators_not_put_back
from bapipe.module_state.python_state import same_tensor
from bapipe.torch_device import CPU, dtype_name, is_out_of_memory
from bapipe.tracing.control_flow import control_flow_in_words
from bapipe.tracing.model import TracedModel
from bapipe.tracing.reasons import SETS_UP_AT_FIRST, Reason
from bapipe.tracing.sizes import repeat_to_batch

_log = logging.getLogger(__name__)

_EMPTIED_OUTSIDE = Reason(
    "it is emptied by code around its layers, which no stage runs: let each call assign to an entry of a dictionary, "
    "such as by the layer's name, in place of adding to a list",
    to_cut="",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """What was compared, and found equal.

    Attributes:
        num_gradients: parameters with a gradient.
        num_buffers: buffers that training changes.
        changed: names of these, and of the parameters without gradients that a forward changes.
        changed_trained: names of the parameters with gradients that a forward changes.
    """

    num_stages: int
    num_gradients: int
    num_buffers: int
    changed: frozenset[str]
    changed_trained: frozenset[str]

    def __str__(self) -> str:
        return (
            f"in {self.num_stages} stages, the model equals the original: loss, {self.num_gradients} gradients, "
            f"{self.num_buffers} changed buffers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """Why the split model could not be compared."""

    reason: str

    def __str__(self) -> str:
        return f"the split model was not compared with the original: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a split model is not the original.

    Attributes:
        path: of the innermost module in which they first differ; empty for the model's own forward.
        code: of the module whose code is the likely cause; empty for the model's own.
        what: what differs there.
    """

    path: str
    code: str
    what: str
    cause: Reason

    def __str__(self) -> str:
        where = f"'{self.path}'" if self.path else "the model"
        return f"{self.what}, first in {where}; {self.cause}"


def example_microbatches(
    inputs: Sequence[Tensor], target: Tensor, sizes: Sequence[int], device: torch.device
) -> tuple[Microbatch, ...]:
    """Returns micro-batches of some sizes on a device, made of examples, each with other values."""
    return tuple(
        Microbatch(
            inputs=tuple(_varied(repeat_to_batch(example, size, device), index) for example in inputs),
            target=repeat_to_batch(target, size, device).roll(index, 0),
        )
        for index, size in enumerate(sizes)
    )


def _varied(tensor: Tensor, index: int) -> Tensor:
    """Returns the rows in another order, and floats a little smaller, so that repeated rows are not equal.

    Zeros alone, which would stay equal, become small numbers above zero: a batch norm divides values that are all equal
    by nearly nothing, and what it gives are the rounding errors of its kernel.
    """
    rolled = tensor.roll(index, 0)
    if not tensor.is_floating_point():
        return rolled
    factors = 1 - 0.25 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(index), device=CPU)
    if not tensor.any():
        return (1 - factors).to(tensor)
    return rolled * factors.to(tensor)


def compare_split(
    model: TracedModel, loss: Loss, microbatches: Sequence[Microbatch]
) -> Equivalence | Unchecked | Difference:
    """Compares the finest stages of a traced model with its own code, on micro-batches one after another.

    The module's values, gradients and attributes are afterwards what they were.

    Raises:
        ForwardCommunicates: the model does, in the context `forwards_checked`.
        InvalidModel: the model calls control flow of torch.
    """

    def run(original: Outcome) -> tuple[Sequence[Stage], Outcome]:
        seen = replace(model, changed=_changed(model.root, original))
        return run_finest_stages(seen, loss, microbatches)

    return _compare(model, run, loss, microbatches, TRAINING)


def compare_stages(
    model: TracedModel,
    stages: Sequence[Stage],
    loss: Loss,
    microbatches: Sequence[Microbatch],
    conditions: Conditions,
) -> Equivalence | Unchecked | Difference:
    """Compares stages, each as it runs in a plan, with the model's own code, as `compare_split`."""
    if conditions == TRAINING:
        warn_of_iterators(model.root)
    return _compare(
        model,
        lambda _: (stages, run_stages(model, stages, loss, microbatches, conditions)),
        loss,
        microbatches,
        conditions,
    )


def warn_of_iterators(module: nn.Module) -> None:
    """Warns of an iterator that comparing a module advances for good."""
    words = iterators_not_put_back(module)
    if words is not None:
        _log.warning("%s", words)


def _compare(
    model: TracedModel,
    run: Callable[[Outcome], tuple[Sequence[Stage], Outcome]],
    loss: Loss,
    microbatches: Sequence[Microbatch],
    conditions: Conditions,
) -> Equivalence | Unchecked | Difference:
    """Compares the original with stages that `run` returns of its outcome, with theirs."""
    try:
        original = run_original(model.root, loss, microbatches, conditions)
    except ForwardCommunicates:
        raise
    except LossFailed as error:
        sizes = " and ".join(map(str, sorted({len(one.target) for one in microbatches})))
        return Unchecked(reason=f"the loss itself fails for micro-batches of {sizes}: {first_line(root_cause(error))}")
    except Exception as error:  # whatever the model's own code raises
        words = control_flow_in_words(error)
        if words is not None:
            raise InvalidModel(words) from error
        return Unchecked(reason=f"the model itself fails: {first_line(error)}")
    if conditions.autocast is not None and not all(grad.isfinite().all() for grad in original.gradients.values()):
        return Unchecked(reason=f"some of its gradients are not finite in {dtype_name(conditions.autocast)}")
    try:
        stages, split = run(original)
    except StageFailed as error:
        if is_out_of_memory(error.cause):
            return Unchecked(reason="there is not enough memory for two micro-batches")
        what = f"as a stage of its own, the {error.phase} fails ({first_line(error.cause)})"
        if error.layer == LOSS:
            return Difference(path=LOSS, code="", what=what, cause=cause_in_loss(what))
        return _difference_at(model, microbatches, error.layer.partition("#")[0], what)
    if not mismatches(original, split, conditions):
        return _equal(model, stages, original, microbatches[0])
    if not repeats(original, run_original(model.root, loss, microbatches, conditions)):
        return Unchecked(reason=_why_it_differs(model, loss))
    noise = perturbed(model.root, loss, microbatches, conditions)
    found = mismatches(original, split, conditions, noise)
    if not found:
        return _equal(model, stages, original, microbatches[0])
    return _difference(
        model,
        microbatches,
        found,
        locate=lambda: first_difference(model, stages, loss, microbatches, conditions),
        reads_outside=lambda: reads_what_forwards_leave(loss, model.root, microbatches[0], conditions),
        sets_up=lambda: bool(set_up_at_first(model.root, microbatches[0], microbatches[0])),
    )


def _why_it_differs(model: TracedModel, loss: Loss) -> str:
    """Says that the original's loss differs from run to run, and what its code reaches that may be the cause."""
    obstacle = state_of_loss(loss, model.root).obstacle
    reaches = "" if obstacle is None else f", and its code reaches {obstacle}, which cannot be put back between runs"
    return f"its loss on the same samples differs from run to run{reaches}"


def _equal(
    model: TracedModel, stages: Sequence[Stage], original: Outcome, microbatch: Microbatch
) -> Equivalence | Difference:
    """Returns what was found equal; a difference if something in stages would take ever more memory even so."""
    grows = growing_collection(model, microbatch)
    if grows is not None:
        what = f"{grows.what} would grow with each micro-batch"
        return Difference(path=grows.layer, code=own_code(model.root, grows.path), what=what, cause=_EMPTIED_OUTSIDE)
    changed = _changed(model.root, original)
    return Equivalence(
        num_stages=len(stages),
        num_gradients=len(original.gradients),
        num_buffers=len(changed.intersection(name for name, _ in model.root.named_buffers())),
        changed=changed,
        changed_trained=frozenset(
            n for n, p in model.root.named_parameters() if p.requires_grad and n in original.state
        ),
    )


def _changed(root: nn.Module, original: Outcome) -> frozenset[str]:
    """Returns the names of the buffers, and of the parameters without gradients, that training passes have changed."""
    constant = ((name, value) for name, value in root.named_parameters() if not value.requires_grad)
    return frozenset(
        name
        for name, value in (*root.named_buffers(), *constant)
        if name in original.state and not same_tensor(original.state[name], value)
    )


def _difference(
    model: TracedModel,
    microbatches: Sequence[Microbatch],
    found: Sequence[Mismatch],
    locate: Callable[[], DifferenceAt | None],
    reads_outside: Callable[[], bool],
    sets_up: Callable[[], bool],
) -> Difference:
    """Returns what differs, and where.

    Args:
        locate: returns where values first differ; None if they do not.
        reads_outside: returns whether the loss reads more than what it is given.
        sets_up: returns whether the first forward changes what later ones leave alone.
    """
    extra = [one for one in found if one.missing == "original"]
    if extra:  # values that should not be there say best where to look
        return _difference_at(model, microbatches, extra[0].name.rpartition(".")[0], str(extra[0]))
    losses = [one.name for one in found if one.kind == "loss"]
    keeps_state = bool(losses) and "0" not in losses
    where = locate()
    is_given_the_same = where is None or where.phase == "backward"
    if losses and is_given_the_same and reads_outside():
        code = "" if where is None else own_code(model.root, where.path)
        what = str(found[0])
        return Difference(path=LOSS, code=code, what=what, cause=cause_in_loss(what))
    if where is not None:
        what = f"{found[0]}; values differ in the {where.phase}{where.between}"
        different = _difference_at(model, microbatches, where.path, what, keeps_state)
        return replace(different, cause=SETS_UP_AT_FIRST) if keeps_state and sets_up() else different
    owner = found[-1].name.rpartition(".")[0] if found[-1].kind != "loss" else ""
    return _difference_at(model, microbatches, owner, str(found[-1]))


def _difference_at(
    model: TracedModel, microbatches: Sequence[Microbatch], path: str, what: str, keeps_state: bool = False
) -> Difference:
    code = own_code(model.root, path)
    single = all(len(one.target) == 1 for one in microbatches)
    cause = likely_cause(model.root, code, what, keeps_state, single_samples=single)
    return Difference(path=path, code=code, what=what, cause=cause)
