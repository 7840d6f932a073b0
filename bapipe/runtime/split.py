"""Cuts a traced model as a plan says."""

from collections.abc import Sequence

from torch import Tensor

from bapipe.errors import InvalidModel
from bapipe.formats.plan import Plan
from bapipe.formats.profile import LOSS
from bapipe.simulator.cuts import check_flow
from bapipe.tracing import TracedModel
from bapipe.tracing.captured import Autocast
from bapipe.tracing.stages import Split, cut_into_stages


def split(model: TracedModel, plan: Plan, inputs: Sequence[Tensor], autocast: Autocast | None = None) -> Split:
    """Returns a plan's stages of a model; `inputs` are examples of any batch size, on any device.

    Under `autocast` tensors between stages have the types that the model computes them in, which profiles count.

    Raises:
        InvalidModel: the plan's layers are not the model's, a tensor would flow backwards, or as `cut_into_stages`.
    """
    check_layers(model, plan)
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.layers}
    check_flow(model.layers, stage_of)
    return cut_into_stages(model, stage_of, inputs, plan.microbatch_size, autocast)


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
