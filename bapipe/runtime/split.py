"""Cuts a traced model as a plan says: the tensors that each stage receives, loads and sends, and its module."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from bapipe.errors import InvalidModel
from bapipe.formats.plan import Plan
from bapipe.formats.profile import LOSS
from bapipe.simulator.stage_cost import check_flow
from bapipe.tracing import TracedModel, changes_buffers, extract, layer_states
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
        tied: parameters that several stages use.
    """

    model: TracedModel
    stages: tuple[StageTensors, ...]
    examples: dict[str, Tensor]
    tied: tuple["TiedParameter", ...]


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


def split(model: TracedModel, plan: Plan, inputs: Sequence[Tensor]) -> Split:
    """Returns a plan's stages of a model; `inputs` are examples of any batch size, on any device.

    A tensor that is used later than in the next stage is relayed by the stages between. A model input is loaded by
    every stage that uses it. Shapes come from one pass of the model on the meta device, which allocates nothing; if
    the model's code needs values, from a pass on its own device.

    Raises:
        InvalidModel: the plan's layers are not the model's, a tensor would flow backwards, stages share a buffer that
            one of them changes, or memory that one changes in place, or a value that is no tensor would cross a cut.
    """
    check_layers(model, plan)
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.layers}
    check_flow(model.layers, stage_of)
    _check_hazards(model, stage_of)
    tied = _tied_parameters(model, stage_of)
    if len(inputs) != len(model.inputs):
        raise InvalidModel(
            f"the model takes {len(model.inputs)} inputs ({', '.join(model.inputs)}); {len(inputs)} examples are given"
        )
    stages = _stages(model, stage_of, len(plan.stages))
    crossing = tuple(dict.fromkeys(name for stage in stages for name in stage.outputs))
    examples = _examples(model, crossing, inputs, plan.microbatch_size)
    return Split(model=model, stages=stages, examples=examples, tied=tied)


def at_size(parts: Split, microbatch_size: int) -> dict[str, Tensor]:
    """Returns the examples of a split for micro-batches of another size.

    Raises:
        InvalidModel: the model does not run on that size.
    """
    crossing = tuple(dict.fromkeys(name for stage in parts.stages for name in stage.outputs))
    inputs = [parts.examples[name] for name in parts.model.inputs]
    return _examples(parts.model, crossing, inputs, microbatch_size)


def with_inputs(parts: Split, inputs: Sequence[Tensor], microbatch_size: int) -> Split:
    """Returns the same split for inputs of other sizes.

    Raises:
        InvalidModel: the model does not run on these sizes.
    """
    crossing = tuple(dict.fromkeys(name for stage in parts.stages for name in stage.outputs))
    return replace(parts, examples=_examples(parts.model, crossing, inputs, microbatch_size))


def stage_module(
    parts: Split,
    index: int,
    device: torch.device | None = None,
    before_random: Callable[[str], None] | None = None,
) -> fx.GraphModule:
    """Returns a stage as a module that takes its `received`, then its `loaded` tensors, and returns its `outputs`.

    Parameters keep their names in the model and are shared with it. Tensors for another stage are contiguous and no
    views, and come from a single node of the autograd graph: see `_Seal`. For `device` and `before_random` see
    `bapipe.tracing.extract`.
    """
    stage = parts.stages[index]
    module = extract(
        parts.model,
        stage.layers,
        (*stage.received, *stage.loaded),
        stage.outputs,
        device=device,
        before_random=before_random,
    )
    # The last stage needs it only if it returns a tensor that it received: torch would detach its receive buffer.
    is_sent = index + 1 < len(parts.stages) or set(stage.outputs) & set(stage.received)
    if stage.outputs and is_sent:
        output = next(node for node in module.graph.nodes if node.op == "output")
        with module.graph.inserting_before(output):
            sealed = module.graph.call_function(seal, tuple(output.all_input_nodes))
        output.args = (sealed,)
        module.recompile()
    return module


def argument_names(parts: Split, tensors: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the arguments by which a stage's module takes some tensors."""
    return tuple(parts.model.node_of[name].name for name in tensors)


class _Seal(torch.autograd.Function):
    """Passes all outputs of a stage through one operator, because:

    - gloo sends contiguous tensors only.
    - torch's I detaches a stage's outputs in place, which is forbidden for views.
    - torch's I finds the groups of weights for W by walking from each parameter to an operator that the stage's inputs
      reach too. Parameters that lead only to an output that no input reaches would be forgotten without an error;
      through this operator all outputs are reached.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        sealed = tuple(tensor.detach() if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors)
        constants = [tensor for tensor, needed in zip(sealed, ctx.needs_input_grad, strict=True) if not needed]
        ctx.mark_non_differentiable(*constants)
        return sealed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def seal(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors, contiguous, as outputs of one autograd operator; copies only what is not contiguous."""
    sealed: tuple[Tensor, ...] = _Seal.apply(*tensors)  # type: ignore[no-untyped-call]
    return sealed


def check_layers(model: TracedModel, plan: Plan) -> None:
    """Raises InvalidModel unless the plan's layers are the model's, with the loss on the last stage."""
    planned = [name for stage in plan.stages for name in stage.layers]
    known = {layer.name for layer in model.layers}
    for name in planned:
        if name != LOSS and name not in known:
            raise InvalidModel(
                f"the plan's layer '{name}' is not in the model: "
                "run the model that the plan was made for, or plan again"
            )
    for layer in model.layers:
        if layer.name not in set(planned):
            raise InvalidModel(
                f"the model's layer '{layer.name}' is in no stage of the plan: "
                "run the model that the plan was made for, or plan again"
            )
    if LOSS not in plan.stages[-1].layers:
        raise InvalidModel(f"the plan's last stage does not hold the layer '{LOSS}': plan again")


def _check_hazards(model: TracedModel, stage_of: dict[str, int]) -> None:
    for hazard in model.hazards:
        reader, writer = stage_of[hazard.reader], stage_of[hazard.writer]
        if reader > writer or (hazard.same_stage and reader != writer):
            raise InvalidModel(
                f"layer '{hazard.writer}' (stage {writer}) changes in place what layer '{hazard.reader}' (stage "
                f"{reader}) reads too: keep them in one stage, or let '{hazard.writer}' give a new tensor"
            )


def _tied_parameters(model: TracedModel, stage_of: dict[str, int]) -> tuple[TiedParameter, ...]:
    """Returns the parameters of several stages; refuses a shared buffer that training changes."""
    used: dict[int, list[tuple[str, str, Tensor]]] = {}
    for layer, state in layer_states(model).items():
        for name, tensor in state.items():
            used.setdefault(id(tensor), []).append((layer, name, tensor))
    tied = []
    for users in used.values():
        stages = tuple(sorted({stage_of[layer] for layer, _, _ in users}))
        layer, name, tensor = users[0]
        if len(stages) == 1:
            continue
        if isinstance(tensor, nn.Parameter):
            tied.append(TiedParameter(name=name, parameter=tensor, stages=stages))
        elif any(changes_buffers(model, user) for user, _, _ in users):
            raise InvalidModel(
                f"buffer '{name}' is used by layers '{layer}' and '{users[-1][0]}' in stages {stages[0]} and "
                f"{stages[-1]}, and training may change it: layers that share such a buffer must share a stage"
            )
    return tuple(tied)


def trained_layers(
    parts: Split, index: int, without: Iterable[nn.Parameter] = ()
) -> tuple[tuple[nn.Parameter, ...], ...]:
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


def _stages(model: TracedModel, stage_of: dict[str, int], num_stages: int) -> tuple[StageTensors, ...]:
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
    model: TracedModel, names: Sequence[str], inputs: Sequence[Tensor], microbatch_size: int
) -> dict[str, Tensor]:
    nodes = [model.node_of[name] for name in names]
    try:
        values = meta_values(model.module, inputs, microbatch_size, nodes)
    except Exception as error:  # whatever the model's own code raises
        values = _run_once(model, names, inputs, microbatch_size, error)
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, Tensor):
            raise InvalidModel(
                f"'{name}' is used across a cut but is no tensor but a {type(value).__name__}: "
                "let each layer find sizes from its own input, as x.flatten(1) does, or plan another cut"
            )
    given = (empty_meta_like(example, (microbatch_size, *example.shape[1:])) for example in inputs)
    return dict(zip(model.inputs, given, strict=True)) | {
        name: empty_meta_like(value, value.shape) for name, value in zip(names, values, strict=True)
    }


def _run_once(
    model: TracedModel, names: Sequence[str], inputs: Sequence[Tensor], microbatch_size: int, fault: Exception
) -> tuple[object, ...]:
    """Returns values of a pass of the whole model on real tensors; buffers and random generators do not change."""
    parameters = list(model.module.parameters())
    message = f"the model fails on micro-batches of {microbatch_size}"
    if any(tensor.is_meta for tensor in (*parameters, *model.module.buffers())):
        raise InvalidModel(f"{message}, on shapes alone: {str(fault).splitlines()[0]}") from fault
    device = parameters[0].device if parameters else inputs[0].device
    given = tuple(repeat_to_batch(example, microbatch_size, device) for example in inputs)
    whole = extract(model, [layer.name for layer in model.layers], model.inputs, names, device=device)
    buffers = {name: buffer.clone() for name, buffer in whole.named_buffers()}
    try:
        with torch.enable_grad(), torch.random.fork_rng():
            values: tuple[object, ...] = torch.func.functional_call(whole, buffers, given)
    except Exception as error:  # whatever the model's own code raises
        raise InvalidModel(f"{message}: {str(error).splitlines()[0]}") from error
    return values
