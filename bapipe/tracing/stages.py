"""Cuts a traced model into stages: the tensors that each stage receives, loads and sends, and their shapes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel, first_line
from bapipe.module_state.cached_functions import caches_bypassed
from bapipe.module_state.python_random import all_generators_restored
from bapipe.module_state.python_state import state_restored
from bapipe.torch_device import CPU
from bapipe.torch_private.tensors import FakeTensorMode, quiet_fake_tensors
from bapipe.tracing.aliasing import maybe_written_buffers, written_buffers
from bapipe.tracing.captured import AUTOCAST, Autocast, autocast_of_training
from bapipe.tracing.control_flow import control_flow_in_words
from bapipe.tracing.extract import extract
from bapipe.tracing.model import TracedModel, layer_states, state_names
from bapipe.tracing.results import no_tensor
from bapipe.tracing.sizes import empty_meta_like, meta_values, repeat_to_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTensors:
    """The names of one stage's layers and tensors.

    Attributes:
        layers: in the model's order, without the loss.
        received: tensors from the stage before, including those that are only relayed.
        loaded: model inputs that the stage uses; the first stage has no other inputs.
        outputs: tensors for the next stage; of the last stage, the model's outputs.
    """

    layers: tuple[str, ...]
    received: tuple[str, ...]
    loaded: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A model cut into stages.

    Attributes:
        examples: shape, dtype and requires_grad, on the meta device, of every tensor at a cut and of the model's
            inputs and outputs, for one micro-batch.
        inputs: examples of the model's inputs with values, of any batch size.
        autocast: the mode in which the stages run; None for that of the process.
        tied: parameters that several stages use.
    """

    model: TracedModel
    stages: tuple[StageTensors, ...]
    examples: dict[str, Tensor]
    tied: tuple["TiedParameter", ...]
    inputs: tuple[Tensor, ...]
    autocast: Autocast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A parameter that several stages use, and whose gradient is the sum of theirs.

    Attributes:
        name: the first of its names in the model.
        stages: ascending.
    """

    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]


def cut_into_stages(
    model: TracedModel,
    stage_of: Mapping[str, int],
    inputs: Sequence[Tensor],
    microbatch_size: int,
    autocast: Autocast | None = None,
) -> Split:
    """Returns the stages of a model; `stage_of` is the stage of each layer, `inputs` are examples of any batch size.

    A tensor that is used later than in the next stage is relayed by the stages between. A model input is loaded by
    every stage that uses it. Shapes and types come from one pass of the model on tensors without values, in the mode
    `autocast`; if the model's code needs values, from a pass on its own device.

    Raises:
        InvalidModel: stages share a buffer that one of them changes, or memory that one changes in place, or a value
            that is no tensor would cross a cut.
    """
    _check_hazards(model, stage_of)
    tied = _tied_parameters(model, stage_of)
    if len(inputs) != len(model.inputs):
        raise InvalidModel(
            f"the model takes {len(model.inputs)} inputs ({', '.join(model.inputs)}); {len(inputs)} examples are given"
        )
    stages = stages_of(model, stage_of)
    crossing = tuple(dict.fromkeys(name for stage in stages for name in stage.outputs))
    examples = _examples(model, crossing, inputs, microbatch_size, autocast)
    return Split(model=model, stages=stages, examples=examples, tied=tied, inputs=tuple(inputs), autocast=autocast)


def at_size(parts: Split, microbatch_size: int) -> dict[str, Tensor]:
    """Returns the examples of a split for micro-batches of another size.

    Raises:
        InvalidModel: the model does not run on that size.
    """
    crossing = tuple(dict.fromkeys(name for stage in parts.stages for name in stage.outputs))
    return _examples(parts.model, crossing, parts.inputs, microbatch_size, parts.autocast)


def trained_layers(parts: Split, index: int, without: Iterable[nn.Parameter]) -> tuple[tuple[nn.Parameter, ...], ...]:
    """Returns the trained parameters of each of a stage's layers; one of several layers counts for the first."""
    states = layer_states(parts.model)
    seen = {id(parameter) for parameter in without}
    layers = []
    for layer in parts.stages[index].layers:
        state = states[layer].values()
        trained = {id(t): t for t in state if isinstance(t, nn.Parameter) and t.requires_grad and id(t) not in seen}
        seen |= set(trained)
        layers.append(tuple(trained.values()))
    return tuple(layers)


def _check_hazards(model: TracedModel, stage_of: Mapping[str, int]) -> None:
    for hazard in model.hazards:
        if hazard.is_broken(stage_of):
            reader, writer = hazard.reader, hazard.writer
            raise InvalidModel(
                f"layer '{writer}' (stage {stage_of[writer]}) changes in place what layer '{reader}' (stage "
                f"{stage_of[reader]}) reads too: keep them in one stage, or let '{writer}' give a new tensor"
            )


def _tied_parameters(model: TracedModel, stage_of: Mapping[str, int]) -> tuple[TiedParameter, ...]:
    """Returns the parameters of several stages; refuses a shared buffer that operators of torch change."""
    tied, written = [], written_buffers(model)
    for name, tensor, stages in _shared_state(model, stage_of):
        if isinstance(tensor, nn.Parameter):
            tied.append(TiedParameter(name=name, parameter=tensor, stages=stages))
        elif id(tensor) in written:
            raise InvalidModel(changing_buffer_in_words(name, stages))
    return tuple(tied)


def changing_buffer_in_words(name: str, stages: Sequence[int]) -> str:
    """Returns why stages cannot share a buffer that one of them changes."""
    return (
        f"buffer '{name}' is used in stages {', '.join(map(str, stages))}, and training changes it, which the others "
        "do not see: layers that share such a buffer must share a stage, or have modules of their own"
    )


def shared_buffers(parts: Split) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Returns the module's buffers that several stages use, and that may be changed (`maybe_written_buffers`), by name.

    Each comes with these stages. They are taken for constants, such as the tables of one rotary embedding that all
    blocks call.
    """
    stage_of = {layer: s for s, stage in enumerate(parts.stages) for layer in stage.layers}
    names, maybe_written = state_names(parts.model.root), maybe_written_buffers(parts.model)
    shared = _shared_state(parts.model, stage_of)
    return {names[id(t)][0]: (t, stages) for _, t, stages in shared if id(t) in names and id(t) in maybe_written}


def _shared_state(model: TracedModel, stage_of: Mapping[str, int]) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Yields (name, tensor, stages) of each parameter and buffer that several stages use."""
    used: dict[int, list[tuple[str, str, Tensor]]] = {}
    for layer, state in layer_states(model).items():
        for name, tensor in state.items():
            used.setdefault(id(tensor), []).append((layer, name, tensor))
    for users in used.values():
        stages = tuple(sorted({stage_of[layer] for layer, _, _ in users}))
        if len(stages) > 1:
            yield users[0][1], users[0][2], stages


def stages_of(model: TracedModel, stage_of: Mapping[str, int]) -> tuple[StageTensors, ...]:
    """Returns the tensors of each stage; `stage_of` is the stage of each layer."""
    num_stages = max(stage_of.values()) + 1
    made_in = {name: stage_of[layer.name] for layer in model.layers for name in layer.outputs}
    used_in: dict[str, set[int]] = {}
    for layer in model.layers:
        for name in layer.inputs:
            used_in.setdefault(name, set()).add(stage_of[layer.name])
    for name in model.outputs:
        used_in.setdefault(name, set()).add(num_stages - 1)
    # cuts[s]: the tensors between stages s and s + 1, made up to s and used later.
    cuts = [tuple(name for name in made_in if made_in[name] <= s < max(used_in[name])) for s in range(num_stages - 1)]
    return tuple(
        StageTensors(
            layers=tuple(layer.name for layer in model.layers if stage_of[layer.name] == s),
            received=cuts[s - 1] if s else (),
            loaded=tuple(name for name in model.inputs if s in used_in.get(name, ())),
            outputs=cuts[s] if s + 1 < num_stages else model.outputs,
        )
        for s in range(num_stages)
    )


def _examples(
    model: TracedModel,
    names: Sequence[str],
    inputs: Sequence[Tensor],
    microbatch_size: int,
    autocast: Autocast | None,
) -> dict[str, Tensor]:
    nodes = [model.node_of[name] for name in names]
    autocast_on = {node.meta[AUTOCAST].device_type for node in model.layer_of if AUTOCAST in node.meta}
    autocast_on |= {autocast.device_type} if autocast is not None else set()
    with autocast_of_training(None if autocast is None else autocast.dtype):
        try:
            if autocast_on:
                kind = autocast_on.pop() if autocast is None else autocast.device_type
                values = _fake_values(model, names, inputs, microbatch_size, torch.device(kind))
            else:
                values = meta_values(model.module, inputs, microbatch_size, nodes)
        except Exception:  # whatever the model's own code raises
            values = _run_once(model, names, inputs, microbatch_size)
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor) and name in model.outputs:
            raise no_tensor(name, value)
        if not isinstance(value, Tensor):
            raise InvalidModel(
                f"'{name}' is used across a cut but is no tensor but a {type(value).__name__}: "
                "let each layer find sizes from its own input, as x.flatten(1) does, or plan another cut"
            )
    given = (empty_meta_like(example, (microbatch_size, *example.shape[1:])) for example in inputs)
    return dict(zip(model.inputs, given, strict=True)) | {
        name: empty_meta_like(value, value.shape) for name, value in zip(names, values, strict=True)
    }


def _fake_values(
    model: TracedModel, names: Sequence[str], inputs: Sequence[Tensor], microbatch_size: int, device: torch.device
) -> tuple[Any, ...]:
    """Returns values of a pass of the whole model on fake tensors; autocast does not change those on the meta device.

    `device` is of the kind that the model's autocast is for.
    """
    whole = extract(model, [layer.name for layer in model.layers], model.inputs, names, device=device)

    def fake(tensor: Tensor, shape: Iterable[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)

    with (
        torch.enable_grad(),
        all_generators_restored(),
        state_restored(whole),  # outside of the mode: it compares the values of buffers
        caches_bypassed(whole),
        quiet_fake_tensors(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        state = {name: fake(t, t.shape) for name, t in (*whole.named_parameters(), *whole.named_buffers())}
        given = tuple(fake(example, (microbatch_size, *example.shape[1:])) for example in inputs)
        values: tuple[Any, ...] = torch.func.functional_call(whole, state, given)
    return values


def _run_once(
    model: TracedModel, names: Sequence[str], inputs: Sequence[Tensor], microbatch_size: int
) -> tuple[Any, ...]:
    """Returns values of a pass of the whole model on real tensors; the model and random generators do not change.

    Parameters and buffers without storage get small random values in it.
    """
    parameters = list(model.module.parameters())
    device = parameters[0].device if parameters else inputs[0].device
    device = CPU if device.type == "meta" else device
    given = tuple(repeat_to_batch(example, microbatch_size, device) for example in inputs)
    whole = extract(model, [layer.name for layer in model.layers], model.inputs, names, device=device)
    try:
        with (
            torch.enable_grad(),
            all_generators_restored(),
            state_restored(whole, parameters=True),
        ):
            state = {n: _small(t, device) for n, t in (*whole.named_parameters(), *whole.named_buffers()) if t.is_meta}
            values: tuple[Any, ...] = torch.func.functional_call(whole, state, given) if state else whole(*given)
    except Exception as error:  # whatever the model's own code raises
        message = f"the model fails on micro-batches of {microbatch_size}: {first_line(error)}"
        raise InvalidModel(control_flow_in_words(error) or message) from error
    return values


def _small(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the same shape with positive values below 0.1, or zeros of integers."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return (torch.rand(tensor.shape, device=device) / 10).to(tensor.dtype).requires_grad_(tensor.requires_grad)
