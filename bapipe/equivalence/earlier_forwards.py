"""Finds the layers whose forward gives something else after an earlier one: they keep values, wherever that is."""

from collections.abc import Sequence

from torch import Tensor

from bapipe.equivalence.outcome import Microbatch, counters_in, trial
from bapipe.equivalence.stage_pass import NoTensor, Stage, StageFailed, run_stage
from bapipe.equivalence.stages import on_finest_stages
from bapipe.errors import InvalidModel
from bapipe.module_state.python_random import generators_restored
from bapipe.module_state.python_state import numbers_kept, same_tensor, state_restored
from bapipe.tracing.changing_state import (
    is_read_by_next_forward,
    layers_with_own_generators,
    limited_embeddings,
)
from bapipe.tracing.model import TracedModel

_MANY_FORWARDS = 2**30


def layers_that_read_earlier_forwards(model: TracedModel, microbatches: Sequence[Microbatch]) -> frozenset[str]:
    """Returns the layers that give another result for the second micro-batch if they have run the first one.

    They may keep a tensor that is no buffer, or running statistics that their forward reads, or will read after many
    forwards. Every layer runs on the same inputs with and without the first micro-batch, and with other running
    statistics, with the same random numbers. A layer whose result differs even
    so from run to run is not among them, unless it holds a random generator of its own; one that counts its forwards
    is, because it may read the number later, and one whose trained parameters change with the samples, such as an
    embedding with `max_norm`. Layers that no cut separates are together. The module is afterwards as it was.

    Raises:
        StageFailed: a layer fails.
    """
    reading = on_finest_stages(model, lambda stages: _reading(model, stages, microbatches))[1]
    return reading | layers_with_own_generators(model)


def _reading(model: TracedModel, stages: Sequence[Stage], microbatches: Sequence[Microbatch]) -> frozenset[str]:
    found: set[str] = set()
    first, second = (dict(zip(model.inputs, one.copy().inputs, strict=True)) for one in microbatches[:2])
    with trial(model.root) as one:

        def run(stage: Stage, microbatch: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
            one.begin_forward(microbatch)
            return _outputs(stage, values)

        for stage in stages:
            with generators_restored(), state_restored(stage.module, parameters=True):
                statistics = _statistics(stage)
                alone = run(stage, 1, second)
                trained_alone = _trained(stage)
                changing = [name for name, now in _statistics(stage).items() if not same_tensor(now, statistics[name])]
            with generators_restored(), state_restored(stage.module, parameters=True):
                _shift(stage, changing)
                reads_statistics = bool(changing) and not _equal(run(stage, 1, second), alone)
            with generators_restored(), state_restored(stage.module, parameters=True):
                repeats = _equal(run(stage, 1, second), alone)
            numbers = [numbers_kept(stage.module)]
            after_first = run(stage, 0, first)
            numbers.append(numbers_kept(stage.module))
            after_second = run(stage, 1, second)
            numbers.append(numbers_kept(stage.module))
            changes = not _equal(_trained(stage), trained_alone) or not _equal(after_second, alone)
            if counters_in(numbers) or limited_embeddings(stage.module) or (repeats and (changes or reads_statistics)):
                found |= set(stage.tensors.layers)
            first |= after_first
            second |= after_second
    return frozenset(found)


def _outputs(stage: Stage, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns what a stage makes of values, which it cannot change.

    Raises:
        NoTensor: one of its outputs is no tensor.
        StageFailed: it fails.
    """
    received = [values[name].detach().clone() for name in stage.tensors.received]
    for own, name in zip(received, stage.tensors.received, strict=True):
        own.requires_grad_(values[name].requires_grad)
    loaded = [values[name].clone() for name in stage.tensors.loaded]
    try:
        outputs = run_stage(stage, received, loaded)
    except InvalidModel as error:
        raise NoTensor(stage.tensors.layers[-1]) from error
    except Exception as error:  # whatever a layer raises
        raise StageFailed(stage.tensors.layers[0], "forward", error) from error
    return dict(zip(stage.tensors.outputs, outputs, strict=True))


def _statistics(stage: Stage) -> dict[str, Tensor]:
    """Returns the values of a stage's buffers that have the names of running statistics."""
    return {n: b.detach().clone() for n, b in stage.module.named_buffers() if not is_read_by_next_forward(n)}


def _shift(stage: Stage, statistics: Sequence[str]) -> None:
    """Makes running statistics what they might be after very many forwards: other values, and large counts."""
    for name in statistics:
        buffer = stage.module.get_buffer(name)
        buffer.copy_(2 * buffer + (1 if buffer.is_floating_point() else _MANY_FORWARDS))


def _trained(stage: Stage) -> dict[str, Tensor]:
    """Returns the values of a stage's trained parameters."""
    return {name: p.detach().clone() for name, p in stage.module.named_parameters() if p.requires_grad}


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(same_tensor(one[name], other[name]) for name in one)
