"""Traces a module and cuts it into a plan's stages, for training, for buckets, for evaluation, and for the check."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.formats.plan import Plan
from bapipe.module_state.modes import evaluation_mode
from bapipe.runtime.split import for_bucket, split
from bapipe.runtime.stage_check import check_stages_equal
from bapipe.tracing.captured import Autocast
from bapipe.tracing.layers import granularity, trace
from bapipe.tracing.stages import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class CutModel:
    """A module cut into a plan's stages. Nothing is allocated: shapes come from a pass on the meta device.

    Attributes:
        trained: stages for inputs of the planned sizes.
        of_buckets: stages for inputs of other sizes.
        evaluated: stages in evaluation mode; None if the model is not evaluated.
        fault_of_one: how the stages differ from the module when they evaluate a single sample; None if they do not, or
            if this was not checked.
    """

    trained: Split
    of_buckets: tuple[Split, ...]
    evaluated: Split | None
    fault_of_one: str | None


def cut_model(
    module: nn.Module,
    plan: Plan,
    inputs: Sequence[Tensor],
    *,
    autocast: torch.dtype | None,
    device: torch.device,
    buckets: Sequence[Sequence[Tensor]],
    evaluates: bool,
    check: bool,
    group: dist.ProcessGroup | None,
) -> CutModel:
    """Traces and cuts a module; the arguments are those of a `Pipeline`, `inputs` and `buckets` its tensors.

    Raises:
        InvalidModel: the module cannot be cut as the plan says, or would not train or evaluate as it does alone.
    """
    cutter = _Cutter(module, plan, None if autocast is None else Autocast(device.type, autocast, True), autocast)
    try:
        trained = cutter.cut(inputs)
    except InvalidModel:  # under autocast it has other layers than the profile, which was then traced without autocast
        if autocast is None:
            raise
        cutter = replace(cutter, traced_in=None)
        trained = cutter.cut(inputs)
    of_buckets = tuple(for_bucket(trained, cutter.cut(other), plan, n) for n, other in enumerate(buckets))
    evaluated = _cut_for_evaluation(cutter, inputs, trained) if evaluates else None
    fault_of_one = None
    if check:
        exact = trained if autocast is None else replace(cutter, mode=None, traced_in=None).cut(inputs)
        fault_of_one = check_stages_equal(
            exact, inputs, plan, group, trains_on=device, trained=trained, evaluated=evaluated
        )
    return CutModel(trained=trained, of_buckets=of_buckets, evaluated=evaluated, fault_of_one=fault_of_one)


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Traces a module in its current mode (training or evaluation) and cuts it.

    Attributes:
        mode: the autocast that the stages run under.
        traced_in: the autocast dtype that the module is traced under.
    """

    module: nn.Module
    plan: Plan
    mode: Autocast | None
    traced_in: torch.dtype | None

    def cut(self, inputs: Sequence[Tensor], *, may_lack_layers: bool = False) -> Split:
        layers = [name for stage in self.plan.stages for name in stage.layers]
        leaf_modules, inlined, operator_layers = granularity(self.module, layers)
        model = trace(
            self.module,
            inputs,
            leaf_modules=leaf_modules,
            operator_layers=operator_layers,
            microbatch_size=self.plan.microbatch_size,
            autocast=self.traced_in,
            layers=() if may_lack_layers else layers,
            inlined=inlined,
        )
        return split(model, self.plan, inputs, self.mode, may_lack_layers=may_lack_layers)


def _cut_for_evaluation(cutter: _Cutter, inputs: Sequence[Tensor], training: Split) -> Split:
    """Returns the stages of a model in evaluation mode, traced anew: a model may run other code in that mode.

    Raises:
        InvalidModel: in that mode it has layers that the plan lacks, or cannot be cut, or a stage loads an input that
            it does not load in training.
    """
    with evaluation_mode([cutter.module]):
        try:
            parts = cutter.cut(inputs, may_lack_layers=True)
        except InvalidModel as error:
            raise InvalidModel(f"in evaluation mode the model cannot be cut as the plan says: {error}") from error
    for s, (there, here) in enumerate(zip(training.stages, parts.stages, strict=True)):
        for name in set(here.loaded) - set(there.loaded):
            raise InvalidModel(f"in evaluation mode stage {s} needs the input '{name}', which it does not in training")
    return parts
