"""Turns errors of the model's own code while a stage runs into one line that names the layer."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx, nn

from bapipe.errors import BapipeError, LayerFailed, one_line, root_cause
from bapipe.job.lost_peer import shows_a_lost_rank
from bapipe.schedules.table import Action, Phase
from bapipe.tracing.structure import OtherStructure

_CHANGED = "modified by an inplace operation"
PASSES = {
    Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.INPUT_GRAD: "backward", Phase.WEIGHT_GRAD: "backward",
}  # fmt: skip
"""What of a layer runs in a phase, in words."""


@contextmanager
def model_errors(action: Action, module: nn.Module, *, recompute: bool) -> Iterator[None]:
    """Raises LayerFailed for whatever the code of a stage's layers, or their backward, raises in this context.

    But for what torch raises where another rank is lost, which is raised as it is.
    """
    try:
        yield
    except BapipeError:
        raise
    except Exception as error:  # whatever the model's own code raises
        cause = root_cause(error)
        if isinstance(cause, BapipeError):  # what torch's stage has put into an error of its own
            raise cause from None
        if isinstance(cause, OtherStructure):
            raise LayerFailed(f"in the {PASSES[action.phase]} of micro-batch {action.microbatch}, {cause}") from error
        if shows_a_lost_rank(cause):  # the stage waited for what another rank sends: no layer is at fault
            raise cause from None
        layer = _layer(cause, module)
        where = f"layer '{layer}' (stage {action.stage})" if layer else f"stage {action.stage}"
        raise LayerFailed(
            f"{where} fails in the {PASSES[action.phase]} of micro-batch {action.microbatch}: "
            f"{one_line(cause)[:200]}{hint(str(cause), recompute=recompute)}"
        ) from error


def hint(text: str, *, recompute: bool) -> str:
    """Returns advice to append to an error of a model's own code; `recompute` says whether the stage recomputes.

    Empty if nothing is known about the error.
    """
    if _CHANGED in text:
        return (
            "; a forward of a later micro-batch may change what this backward needs, because forwards run ahead of "
            "backwards: let the model use a copy of it (clone())"
        )
    if re.search(r"\bmeta\b", text):
        return (
            "; it reads a parameter or buffer of another stage, which is on the meta device here: make it a parameter "
            "of the module that reads it too, or return what the loss needs of it from the model"
        )
    if recompute and "require" in text and "grad" in text:
        return (
            "; a recomputed stage runs its forward without gradients first, so a forward that computes gradients "
            "cannot be in one: plan without recomputation"
        )
    return ""


def _layer(error: BaseException, module: nn.Module) -> str:
    """Returns the path of the outermost module of a stage in whose forward an error was raised; empty if in none."""
    stage = next(part for part in module.modules() if isinstance(part, fx.GraphModule))
    paths = {id(part): path for path, part in stage.named_modules() if path}
    trace = error.__traceback__
    while trace is not None:
        path: str | None = paths.get(id(trace.tb_frame.f_locals.get("self")))
        if path:
            return path
        trace = trace.tb_next
    return ""
