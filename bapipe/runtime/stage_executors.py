"""The executors of a rank's stages: one for each input size to train on, and one to evaluate with."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.equivalence.outcome import Loss
from bapipe.equivalence.sample_dims import SampleDim
from bapipe.equivalence.target_weights import WeightsAhead
from bapipe.formats.plan import Plan
from bapipe.runtime.autocast import AutocastStage
from bapipe.runtime.clock import Clock
from bapipe.runtime.collectives_check import loss_checked
from bapipe.runtime.evaluation import ForwardExecutor
from bapipe.runtime.executor import ScheduleExecutor
from bapipe.runtime.local_stage import LocalStage
from bapipe.runtime.loss_weights import LossWeights
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.runtime.recompute_layers import PartlyRecomputedStage
from bapipe.runtime.replicas import Replicas
from bapipe.runtime.rng import PerOperatorRng
from bapipe.runtime.transfers import Channels
from bapipe.torch_settings import autocast_on
from bapipe.tracing.model import TracedModel
from bapipe.tracing.stage_module import argument_names, needs_seal, stage_module
from bapipe.tracing.stage_parts import stage_parts
from bapipe.tracing.stages import Split


class LossModule(nn.Module):
    """A loss as a module; if it is a module itself, it is a submodule, so that its state and mode are found."""

    def __init__(self, loss: Loss, computed: Loss) -> None:
        """`computed` takes the last stage's outputs, and calls `loss` with what the model would return."""
        super().__init__()
        self.computed = computed
        if isinstance(loss, nn.Module):
            self.loss = loss

    def forward(self, output: Any, target: Tensor) -> Tensor:
        return self.computed(output, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorFactory:
    """Makes executors of this rank's stages.

    Attributes:
        modules: this rank's stages.
        replicas: those of its stages that run on several ranks.
        channels: the groups that carry tensors between stages.
        loss: the loss of what the model returns and the target.
        sample_dims: where the tensors that the model returns have their samples; empty on ranks without the loss.
        autocast: the dtype of autocast for forwards and the loss; None without autocast.
    """

    plan: Plan
    layout: ProcessLayout
    modules: Mapping[int, nn.Module]
    replicas: Mapping[int, Replicas]
    channels: Channels
    loss: Loss
    sample_dims: Sequence[SampleDim]
    autocast: torch.dtype | None
    clock: Clock
    rng: PerOperatorRng

    def training(self, parts: Split) -> ScheduleExecutor:
        """Returns the executor of training steps on inputs with the shapes in `parts`."""
        stages = [self._local_stage(s, parts) for s in sorted(self.modules)]
        last, order = len(self.plan.stages) - 1, self.layout.schedule.order[self.layout.rank]
        loss, outputs = self._loss_of_stage_outputs(parts.model), [parts.examples[n] for n in parts.stages[-1].outputs]
        weights = LossWeights(
            WeightsAhead(self.loss, loss, outputs, self.sample_dims, self.layout.device),
            sorted({action.microbatch for action in order if action.stage == last}),
            self.replicas[last].total if last in self.replicas else lambda part: part,
            self.rng,
            partial(loss_checked, self.layout, last),
        )
        return ScheduleExecutor(
            self.layout,
            stages,
            channels=self.channels,
            loss=loss,
            weights=weights,
            clock=self.clock,
            rng=self.rng,
        )

    def evaluation(self, parts: Split) -> ForwardExecutor:
        """Returns the executor of forwards in evaluation mode, of a model that was traced and cut in that mode."""
        rng = self.rng.for_evaluation()
        modules = {s: stage_module(parts, s, self.layout.device, rng) for s in self.modules}
        last = self.replicas.get(len(self.plan.stages) - 1)
        return ForwardExecutor(
            self.layout,
            parts,
            {s: self._with_autocast(module, _output_dtypes(parts, s)) for s, module in modules.items()},
            channels=self.channels,
            microbatch_size=self.plan.microbatch_size,
            loss=self._loss_of_stage_outputs(parts.model),
            sum_over_replicas=last.total_of_evaluation if last is not None else lambda part: part,
            rng=rng,
        )

    def _local_stage(self, index: int, parts: Split) -> LocalStage:
        stage, examples = parts.stages[index], parts.examples
        taken = stage.received if index else stage.loaded
        recomputed, module = frozenset(self.plan.stages[index].recomputed), self.modules[index]
        recomputes_all = len(recomputed) == len(self.plan.stages[index].layers)
        partly = self._partly_recomputed(index, parts, recomputed) if recomputed and not recomputes_all else None
        return LocalStage(
            index=index,
            module=self._with_autocast(partly or module, _output_dtypes(parts, index)),
            received=tuple(examples[name] for name in taken),
            outputs=tuple(examples[name] for name in stage.outputs),
            output_names=stage.outputs if index + 1 < len(parts.stages) else (),
            arguments=argument_names(parts, stage.loaded) if index else (),
            recompute=recomputes_all,
            before_backward=None if partly is None else partly.recompute,
            last_backward=self.replicas[index].gradients.last_backward if index in self.replicas else nullcontext,
        )

    def _partly_recomputed(self, index: int, parts: Split, recomputed: AbstractSet[str]) -> PartlyRecomputedStage:
        stage = parts.stages[index]
        by_position = stage.received if index else stage.loaded
        by_name = stage.loaded if index else ()
        return PartlyRecomputedStage(
            self.modules[index],
            stage_parts(parts, index, recomputed, self.layout.device, self.rng),
            received=by_position,
            arguments=dict(zip(argument_names(parts, by_name), by_name, strict=True)),
            outputs=stage.outputs,
            is_sealed=needs_seal(parts, index),
            device=self.layout.device,
            autocast=self.autocast,
            rng=self.rng,
        )

    def _with_autocast(self, module: nn.Module, outputs: Sequence[torch.dtype]) -> nn.Module:
        """Returns a stage's module, under autocast if that is on."""
        return module if self.autocast is None else AutocastStage(module, self.layout.device, self.autocast, outputs)

    def _loss_of_stage_outputs(self, model: TracedModel) -> LossModule:
        """Returns the loss as a function of the tuple that the last stage returns, not of what the model returns."""
        rebuild = model.result.rebuild

        def computed(output: Any, target: Tensor) -> Tensor:
            with autocast_on(self.layout.device, self.autocast):
                return self.loss(rebuild(output), target)

        return LossModule(self.loss, computed)


def _output_dtypes(parts: Split, stage: int) -> list[torch.dtype]:
    return [parts.examples[name].dtype for name in parts.stages[stage].outputs]
