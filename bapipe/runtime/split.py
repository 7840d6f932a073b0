"""Cuts a traced model into the stages of a plan."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import attrgetter

from torch import Tensor, fx, nn

from bapipe.errors import InvalidModel
from bapipe.formats.plan import Plan
from bapipe.formats.profile import LOSS
from bapipe.printable import are_one_layer
from bapipe.simulator.cuts import check_flow
from bapipe.tracing.captured import Autocast
from bapipe.tracing.leaf_modules import patterns_of
from bapipe.tracing.model import TracedModel
from bapipe.tracing.stage_parts import stage_parts
from bapipe.tracing.stages import Split, cut_into_stages


def split(
    model: TracedModel,
    plan: Plan,
    inputs: Sequence[Tensor],
    autocast: Autocast | None = None,
    *,
    may_lack_layers: bool = False,
) -> Split:
    """Returns a plan's stages of a model; `inputs` are examples of any batch size, on any device.

    Under `autocast` tensors between stages have the types in which the model computes them, as profiles assume. With
    `may_lack_layers`, as in evaluation mode, the model need not have all of the plan's layers, such as heads that are
    used only in training.

    Raises:
        InvalidModel: the plan's layers are not the model's, a tensor would flow backwards, or as `cut_into_stages`.
    """
    planned = {name for stage in plan.stages for name in stage.layers}
    others = [layer.name for layer in model.layers if layer.name not in planned]
    if not may_lack_layers:
        _check_has_layers_of(plan, model)
    if others:
        raise InvalidModel(_of_evaluation_only(model, planned, others) if may_lack_layers else _in_no_stage(others[0]))
    if LOSS not in plan.stages[-1].layers:
        raise InvalidModel(f"the plan's last stage does not hold the layer '{LOSS}': plan again")
    known = {LOSS, *(layer.name for layer in model.layers)}
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.layers if name in known}
    check_flow(model.layers, stage_of)
    return cut_into_stages(model, stage_of, inputs, plan.microbatch_size, autocast)


def for_bucket(parts: Split, traced: Split, plan: Plan, bucket: int) -> Split:
    """Returns a plan's stages for inputs of other sizes, such as shorter sentences.

    Args:
        traced: the split of the model traced with these inputs.
        bucket: the number of these inputs, for errors.

    Raises:
        InvalidModel: a stage's graph contains a size of the planned inputs as a number.
    """
    for s, stage in enumerate(plan.stages):
        recomputed = frozenset(stage.recomputed)
        for planned, other in zip(stage_parts(parts, s, recomputed), stage_parts(traced, s, recomputed), strict=True):
            lines = zip_longest(*(_computation(part.module, parts.model.root) for part in (planned, other)))
            for line, other_line in lines:
                if line != other_line:
                    raise InvalidModel(
                        f"`buckets`: stage {s} computes '{line}' for inputs of the planned sizes, but '{other_line}' "
                        f"for those of bucket {bucket}: a stage holds all sizes but the batch's as numbers. Let the "
                        "layer that uses a size read it from its own input, or train without buckets"
                    )
    return replace(parts, examples=traced.examples)


def _computation(stage: fx.GraphModule, root: nn.Module) -> Iterator[str]:
    """Yields what a stage of a model computes, line by line: its code, and the constants made by tracing."""
    for line in stage.code.splitlines():
        yield line.partition(";")[0].strip()
    own = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    for node in stage.graph.nodes:
        if node.op == "get_attr":
            value = attrgetter(node.target)(stage)
            if isinstance(value, Tensor) and id(value) not in own:
                yield f"{node.target} = {tuple(value.shape) if value.is_meta else value.tolist()}"


def _check_has_layers_of(plan: Plan, model: TracedModel) -> None:
    """Raises InvalidModel unless the plan's layers are in the model."""
    known = {layer.name for layer in model.layers}
    for name in (name for stage in plan.stages for name in stage.layers):
        if name != LOSS and name not in known:
            raise InvalidModel(
                f"the plan's layer '{name}' is not in the model: "
                "run the model that the plan was made for, or plan again"
            )


def _in_no_stage(name: str) -> str:
    return (
        f"the model's layer '{name}' is in no stage of the plan: run the model that the plan was made for, or plan "
        "again"
    )


def _of_evaluation_only(model: TracedModel, planned: Collection[str], others: Sequence[str]) -> str:
    """Says which layers a model in evaluation mode has and a plan has not, why, and what to do.

    A module may be one layer there, and several in training: where it does only in evaluation what a graph cannot hold.
    """
    paths = dict.fromkeys(name.partition("#")[0] for name in others)
    whole = [path for path in paths if any(name.startswith(f"{path}.") for name in planned)]
    if not whole:
        return (
            f"its layer '{others[0]}' runs in that mode only, so it is in no stage: let training call it too, or "
            "evaluate with the module itself"
        )
    kind = type(model.root.get_submodule(whole[0]))
    alike = [path for path in whole if type(model.root.get_submodule(path)) is kind]
    reason = model.leaf_reasons.get(whole[0])
    why = "" if reason is None or not reason.to_cut else f" ({reason})"  # not where its text is advice, too
    return (
        f"{are_one_layer(alike, kind.__name__)} in that mode{why}, and several in training: profile with "
        f"`leaf_modules={patterns_of(model.root, whole)}`, with which they are one layer in both modes, and plan again"
    )
