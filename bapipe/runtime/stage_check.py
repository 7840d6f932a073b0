"""Compares a plan's stages with the module that they were cut from, before they train."""

import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.equivalence.check import Difference, Equivalence, Unchecked, compare_stages, example_microbatches
from bapipe.equivalence.communication import forwards_checked
from bapipe.equivalence.earlier_forwards import layers_that_read_earlier_forwards
from bapipe.equivalence.outcome import TRAINING, Conditions, Microbatch, device_of, run_original
from bapipe.equivalence.stage_pass import NoTensor
from bapipe.errors import InvalidModel
from bapipe.formats.plan import Plan
from bapipe.module_state.modes import evaluation_mode
from bapipe.runtime.model_errors import hint
from bapipe.runtime.planned_stage import planned_stage
from bapipe.runtime.replica_state import check_changes_of_replicas, with_replicas
from bapipe.schedules.table import Phase
from bapipe.torch_device import describe
from bapipe.torch_private.tensors import tree_leaves
from bapipe.tracing.changing_state import is_read_by_next_forward, limited_embeddings
from bapipe.tracing.model import layer_states, state_names
from bapipe.tracing.stages import Split, changing_buffer_in_words, shared_buffers

_log = logging.getLogger(__name__)

_MAX_PASS_S = 2.0
"""Longest F and B of the module on a CPU with which stages are compared if GPUs wait: it runs about a dozen times."""


def check_stages_equal(
    parts: Split,
    inputs: Sequence[Tensor],
    plan: Plan,
    group: dist.ProcessGroup | None,
    *,
    trains_on: torch.device,
    trained: Split | None,
    evaluated: Split | None,
) -> str | None:
    """Raises InvalidModel unless the stages, also as replicas, give the gradients and changed buffers of the module.

    The stages run as in the plan, with recomputation and with I and W apart. Every process calls this; process 0 of the
    group compares, as all have the same module, and tells the others. Nothing is compared if its module is on the meta
    device; nor, with a warning, if the parameters take a quarter of the memory or more, or if comparing would take long
    on a CPU while GPUs wait.

    Returns how the stages differ from the module when they evaluate a micro-batch of a single sample, as the last one
    may be; None if they do not, or were not compared.

    Args:
        parts: the stages, traced without autocast.
        trains_on: the device that the stages will train on.
        trained: the stages as they will train; if they do so under autocast, they are compared as well. None if that
            is as `parts`.
        evaluated: the stages in evaluation mode, of which the forward is compared; None without.
    """
    faults: list[str | None] = [None, None]
    if dist.get_rank(group) == 0:
        with forwards_checked(parts.model.root, group):
            faults = [*_faults(parts, inputs, plan, trains_on, trained, evaluated)]
    dist.broadcast_object_list(faults, group=group, group_src=0)
    if faults[0] is not None:
        raise InvalidModel(faults[0])
    return faults[1]


def _is_anywhere_on_meta(module: nn.Module, inputs: Sequence[Tensor]) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers(), *inputs))


def _faults(
    parts: Split,
    inputs: Sequence[Tensor],
    plan: Plan,
    trains_on: torch.device,
    trained: Split | None,
    evaluated: Split | None,
) -> tuple[str | None, str | None]:
    """Returns how the stages differ from the module, and how they do when they evaluate a single sample.

    Each is None if they do not differ, or were not compared.
    """
    root = parts.model.root
    device = device_of(root)
    if _is_anywhere_on_meta(root, inputs):
        return None, None
    params, memory = sum(parameter.nbytes for parameter in root.parameters()), describe(device).memory_bytes
    if 4 * params >= memory:  # they, their gradients, and copies of both would not fit
        _log.warning(
            "the stages are not compared with the model: its parameters take %.1f GB of the %.1f GB of memory where it "
            "would run, and comparing takes up to four times as much; compare them on a machine with more, or a "
            "smaller model of the same kind",
            params / 1e9,
            memory / 1e9,
        )
        return None, None
    try:
        _check_tied(parts, ())
        slow = trains_on.type == "cuda" and device.type == "cpu"
        if slow and (pass_s := _pass_s(parts, plan, inputs)) > _MAX_PASS_S:
            _log.warning(
                "the stages are not compared with the model again, which was compared when it was profiled: a forward "
                "and backward on this machine's CPU takes %.0f s",
                pass_s,
            )
            return None, None
        fault = _training_fault(parts, inputs, plan, trained)
        if fault is None and evaluated is not None:
            return _evaluation_faults(evaluated, inputs, plan)
        return fault, None
    except InvalidModel as error:
        return str(error), None
    except NoTensor as error:
        return str(error.__cause__), None
    except Exception as error:  # whatever the model's own code raises; the other processes are waiting
        return f"comparing the stages with the module failed: {type(error).__name__}: {error}", None


def _training_fault(parts: Split, inputs: Sequence[Tensor], plan: Plan, trained: Split | None) -> str | None:
    result = _compare(parts, plan, inputs, TRAINING)
    if isinstance(result, Equivalence):
        _check_tied(parts, result.changed | result.changed_trained)
        _check_kept_values(parts, plan, inputs, result.changed)
    if isinstance(result, Difference):
        return f"the stages would not train as the module does: {result}{_advice(parts, plan, inputs, str(result))}"
    if trained is not None and trained.autocast is not None:
        result = _compare(trained, plan, inputs, Conditions(autocast=trained.autocast.dtype))
        if isinstance(result, Difference):
            return f"under autocast the stages would not train as the module does: {result}"
    return None


def _evaluation_faults(parts: Split, inputs: Sequence[Tensor], plan: Plan) -> tuple[str | None, str | None]:
    """Returns how stages in evaluation mode differ from the module, and how they do on a single sample."""
    conditions = Conditions(autocast=None if parts.autocast is None else parts.autocast.dtype, trains=False)
    with evaluation_mode([parts.model.root, parts.model.module]):
        result = _compare(parts, plan, inputs, conditions)
        if isinstance(result, Difference):
            return f"in evaluation mode the stages would not give what the module does: {result}", None
        # Code may do other things with a single sample, such as drop its dimension.
        of_one = _compare(parts, plan, inputs, conditions, size=1)
    return None, str(of_one) if isinstance(of_one, Difference) else None


def _pass_s(parts: Split, plan: Plan, inputs: Sequence[Tensor]) -> float:
    """Returns how long F and B of a micro-batch of the module take on a CPU; 0 if they fail."""
    start_s = time.monotonic()
    try:
        run_original(parts.model.root, _weighted_sum, _microbatches(parts, plan, inputs)[:1])
    except Exception:  # whatever the model's own code raises; the comparison will report it
        return 0.0
    return time.monotonic() - start_s


def _advice(parts: Split, plan: Plan, inputs: Sequence[Tensor], difference: str) -> str:
    recompute = any(stage.recompute for stage in plan.stages)
    known = hint(difference, recompute=recompute)
    if known or not recompute or isinstance(_compare(parts, plan, inputs, TRAINING, recompute=False), Difference):
        return known
    return "; it does not if no stage recomputes, because a forward keeps values: plan without recomputation"


def _compare(
    parts: Split,
    plan: Plan,
    inputs: Sequence[Tensor],
    conditions: Conditions,
    *,
    recompute: bool = True,
    size: int = 2,
) -> Equivalence | Unchecked | Difference:
    """Compares stages with the module, on micro-batches of `size` samples if the plan's are not smaller."""
    device, microbatches = device_of(parts.model.root), _microbatches(parts, plan, inputs, size)
    split = {action.stage for actions in plan.table.order for action in actions if action.phase is Phase.INPUT_GRAD}
    stages = [
        planned_stage(
            parts,
            index,
            stage if recompute else msgspec.structs.replace(stage, recompute=False, recompute_layers=msgspec.UNSET),
            device,
            conditions,
            has_i_and_w=index in split,
        )
        for index, stage in enumerate(plan.stages)
    ]
    result = compare_stages(parts.model, stages, _weighted_sum, microbatches, conditions)
    if isinstance(result, Unchecked):  # under other conditions it was compared without them, or need not be
        _log.log(logging.WARNING if conditions == TRAINING else logging.INFO, "%s", result)
    return result


def _check_tied(parts: Split, changed: Collection[str]) -> None:
    """Raises InvalidModel if a forward of one stage changes a parameter or buffer that others use.

    `changed` are the names of tensors that are known to change.
    """
    names = state_names(parts.model.root)
    limited = {id(parameter) for parameter in limited_embeddings(parts.model.root)}
    for tied in parts.tied:
        if id(tied.parameter) in limited or not set(names[id(tied.parameter)]).isdisjoint(changed):
            raise InvalidModel(
                f"'{tied.name}' is used in stages {', '.join(map(str, tied.stages))}, and a forward of one of them "
                "changes it, which the others do not see: layers that share such a parameter must share a stage"
            )
    for name, (buffer, stages) in shared_buffers(parts).items():
        if not set(names[id(buffer)]).isdisjoint(changed):
            raise InvalidModel(changing_buffer_in_words(name, stages))


def _check_kept_values(parts: Split, plan: Plan, inputs: Sequence[Tensor], changed: Collection[str]) -> None:
    """Raises InvalidModel if a stage's forward may read values left by another forward than in the whole model.

    This happens if the stage has replicas, or runs the forwards of micro-batches in another order. `changed` are the
    names of tensors that forwards change.
    """
    orders = [_order_of_forwards(index, plan) for index in range(len(plan.stages))]
    as_whole = [
        len(stage.devices) == 1 and order == sorted(order) for stage, order in zip(plan.stages, orders, strict=True)
    ]
    if all(as_whole):
        return
    states, names = layer_states(parts.model), state_names(parts.model.root)
    reading = layers_that_read_earlier_forwards(parts.model, _microbatches(parts, plan, inputs))
    for index, stage in enumerate(plan.stages):
        layers = parts.stages[index].layers
        tensors = (tensor for layer in layers for tensor in states[layer].values())
        used = {name for tensor in tensors for name in names.get(id(tensor), ())} & set(changed)
        if len(stage.devices) > 1:
            check_changes_of_replicas(index, used)
        kept = [
            f"'{name}' in stage {index} changes in forwards" for name in sorted(used) if is_read_by_next_forward(name)
        ]
        kept += [
            f"layer '{name}' in stage {index} keeps values from forward to forward"
            for name in layers
            if name in reading
        ]
        if kept and not as_whole[index]:
            raise InvalidModel(_differs_from_whole(kept[0], orders[index], has_replicas=len(stage.devices) > 1))


def _differs_from_whole(what: str, order: Sequence[int], *, has_replicas: bool) -> str:
    if has_replicas:
        return with_replicas(what)
    return (
        f"{what}, and the plan runs F of the micro-batches in the order {list(order)}, so training would differ from "
        "that in one process: choose a named schedule"
    )


def _order_of_forwards(stage: int, plan: Plan) -> list[int]:
    return [
        action.microbatch
        for actions in plan.table.order
        for action in actions
        if action.stage == stage and action.phase is Phase.FORWARD
    ]


def _microbatches(parts: Split, plan: Plan, inputs: Sequence[Tensor], size: int = 2) -> tuple[Microbatch, ...]:
    """Returns two example micro-batches: the second shows what the forward of the first has left."""
    device = device_of(parts.model.root)
    size = min(plan.microbatch_size, size)
    # The loss is not needed, nor its target: any function of all outputs shows a wrong gradient.
    return example_microbatches(inputs, torch.zeros(size, device=device), [size, size], device)


def _weighted_sum(output: Any, target: Tensor) -> Tensor:
    """Returns a sum of all floats in a model's output, each element with a weight of its own."""
    total = target.sum()
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1).to(total.dtype)
            total = total + flat @ torch.arange(1, len(flat) + 1, device=flat.device).to(flat.dtype).cos()
    return total
