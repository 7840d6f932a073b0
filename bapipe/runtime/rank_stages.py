"""The stages of a plan that one rank runs: cut out of a module, with storage and values, not yet connected."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.equivalence.outcome import Loss
from bapipe.equivalence.sample_dims import SampleDim
from bapipe.equivalence.samples_of_model import sample_dims_of_model
from bapipe.formats.plan import Plan
from bapipe.module_state.modes import idle_dropout, is_evaluating
from bapipe.module_state.unregistered import unregistered_parameters
from bapipe.runtime.batch_check import BatchSpec
from bapipe.runtime.cut_model import CutModel, cut_model
from bapipe.runtime.initial_values import warn_of_unlike_values
from bapipe.runtime.materialize import drop_others, materialize
from bapipe.runtime.peak_memory import PeakMemory
from bapipe.runtime.process_layout import ProcessLayout, layout_of
from bapipe.runtime.rng import PerOperatorRng
from bapipe.runtime.same_model import check_same_model
from bapipe.runtime.settings_check import check_settings
from bapipe.runtime.shared_buffers import SharedBuffers
from bapipe.runtime.stage_state import StageState
from bapipe.runtime.traced_values import TracedValues
from bapipe.schedules.table import Schedule
from bapipe.torch_device import move_tensors
from bapipe.tracing.bound_inputs import Inputs, check_buckets, check_inputs, only_tensor_inputs, tensor_inputs
from bapipe.tracing.capture import check_has_layers
from bapipe.tracing.changing_state import changing_buffers
from bapipe.tracing.model import persistent_state, state_names, unused_state
from bapipe.tracing.stage_module import argument_names, stage_module
from bapipe.tracing.stages import Split

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStages:
    """A rank's stages of a plan.

    Attributes:
        layout: which process runs which rank.
        cut: the module cut into the stages of all ranks.
        modules: the modules of this rank's stages, in the order in which their gradients become final.
        state: the parameters and buffers of these modules.
        sample_dims: where the tensors that the model returns have their samples; empty on ranks without the loss.
        rng: seeds what the modules draw.
        traced_values: what code has read while it was traced, and must not change later.
        shared_buffers: what steps must not change.
        peak_memory: of the device, since it has held nothing but these modules.
    """

    plan: Plan
    layout: ProcessLayout
    cut: CutModel
    modules: Mapping[int, nn.Module]
    state: StageState
    sample_dims: Sequence[SampleDim]
    rng: PerOperatorRng
    traced_values: TracedValues
    shared_buffers: SharedBuffers
    peak_memory: PeakMemory

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the model's inputs that this rank loads."""
        loaded = {name for s in self.modules for name in self.cut.trained.stages[s].loaded}
        return tuple(name for name in self.cut.trained.model.inputs if name in loaded)

    @property
    def needs_target(self) -> bool:
        """Whether this rank computes the loss."""
        return len(self.plan.stages) - 1 in self.modules

    @property
    def sized(self) -> list[Split]:
        """The stages of all ranks for each size of inputs, the planned size first."""
        return [self.cut.trained, *self.cut.of_buckets]

    def batch_spec(self, parts: Split) -> BatchSpec:
        """Returns what a mini-batch must be like on this rank; `parts` are the stages for its size of inputs."""
        return BatchSpec(
            needed=self.needs,
            examples=parts.examples,
            minibatch_size=self.plan.minibatch_size,
            device=self.layout.device,
            settings=self.plan.compute_settings,
        )

    def arguments(self, loaded: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Returns the inputs of the first stage by position, and those that later stages load by argument name."""
        stages = self.cut.trained.stages
        first = stages[0].loaded if 0 in self.modules else ()
        later = tuple(dict.fromkeys(name for s in self.modules if s > 0 for name in stages[s].loaded))
        names = argument_names(self.cut.trained, later)
        return [loaded[name] for name in first], {
            argument: loaded[name] for argument, name in zip(names, later, strict=True)
        }


def make_rank_stages(
    module: nn.Module,
    plan: Plan,
    *,
    loss: Loss,
    inputs: Inputs,
    autocast: torch.dtype | None,
    device: torch.device,
    seed: int,
    initialize: Callable[[nn.Module], None] | None,
    buckets: Sequence[Sequence[Tensor]],
    evaluates: bool,
    check: bool,
    group: dist.ProcessGroup | None,
) -> RankStages:
    """Cuts a module and gives this rank's layers storage; all processes of the group call it together.

    The arguments are those of a `Pipeline`.

    Raises:
        BapipeError: the plan is not for this model or this group, was made from a profile with other settings, or
            cannot run; or its stages would not train as the module does.
    """
    layout = layout_of(plan, device, group)
    check_has_layers(module)
    check_inputs(module, inputs)
    check_buckets(buckets, len(tensor_inputs(inputs)))
    _warn_of_untrained(module)
    check_settings(plan, module, device, autocast)
    keys, names = frozenset(persistent_state(module)), state_names(module)
    with only_tensor_inputs(module, inputs) as tensors:
        cut = cut_model(
            module,
            plan,
            tensors,
            autocast=autocast,
            device=device,
            buckets=buckets,
            evaluates=evaluates,
            check=check,
            group=group,
        )
    parts, own = cut.trained, _in_order_of_updates(layout.schedule, layout.rank)
    has_loss = len(plan.stages) - 1 in own
    # What is found while the module has the values of all layers.
    sample_dims = sample_dims_of_model(parts) if has_loss else ()
    traced_values, shared_buffers = TracedValues(parts.model), SharedBuffers(parts, own)
    check_same_model(parts.model, loss, group)
    warn_of_unlike_values(module, group)

    rng = PerOperatorRng(seed, device)
    modules = {s: stage_module(parts, s, device, rng) for s in own}
    state = StageState(
        modules=modules,
        # The first stage also holds parameters and buffers that no layer uses, so that checkpoints have all of them.
        unused=tuple(unused_state(parts.model).values()) if 0 in own else (),
        names=names,
        keys=keys,
        non_persistent=changing_buffers(parts.model) - keys,
    )
    drop_others(parts, state.tensors())
    peak_memory = PeakMemory(device, state.tensors())
    materialize(parts, state.tensors(), device, seed, initialize)
    if has_loss:
        move_tensors(loss, device)  # such as class weights
    return RankStages(
        plan=plan,
        layout=layout,
        cut=cut,
        modules=modules,
        state=state,
        sample_dims=sample_dims,
        rng=rng,
        traced_values=traced_values,
        shared_buffers=shared_buffers,
        peak_memory=peak_memory,
    )


def _warn_of_untrained(module: nn.Module) -> None:
    """Warns of parts that will not train as a user may expect."""
    if is_evaluating(module):
        idle: str | None = (
            "the module is in evaluation mode, and so are its stages: dropout does nothing, and running statistics "
            "do not change; call train() on it before, and then eval() on the parts that should stay in that mode"
        )
    else:
        idle = idle_dropout(module)
    for fault in (idle, unregistered_parameters(module)):
        if fault is not None:
            _log.warning("%s", fault)


def _in_order_of_updates(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Returns a rank's stages in the order in which their gradients become final; stages without actions come last."""
    last = {action.stage: i for i, action in enumerate(schedule.order[rank])}  # index of a stage's last action
    stages = [s for s, ranks in enumerate(schedule.devices) if rank in ranks]
    return tuple(sorted(stages, key=lambda s: (s not in last, last.get(s, 0), s)))
