"""A schedule on torch's pipeline runtime: the only file that uses names torch does not promise to keep."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _RecvInfo

from bapipe.errors import BapipeError
from bapipe.runtime.clock import Clock
from bapipe.schedule import Action, Phase, Schedule

_RECEIVES = (_ComputationType.RECV_F, _ComputationType.RECV_B)

_EVERY_INPUT_HAS_A_GRADIENT = "tensor_meta" not in inspect.signature(_RecvInfo).parameters
"""Before torch 2.13 a stage sends a gradient for everything it receives, and receives floats only.

Its W is also wrong where it starts at an operator with several outputs, as it may in a stage that loads inputs.
"""

Loss = Callable[[Any, Tensor], Tensor]
"""(what the last stage gives, target) -> mean loss over the micro-batch, a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStage:
    """A stage that this process runs.

    Attributes:
        module: takes the received tensors by place and `arguments` by name, and gives a tuple.
        received, outputs: shapes of one micro-batch on the meta device; of the first stage, `received` is what it
            loads, which it takes by place.
        arguments: names of the model inputs that a later stage loads.
    """

    index: int
    module: nn.Module
    received: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    arguments: tuple[str, ...] = ()


@dataclass(slots=True)
class _Run:
    """An action that ran, by stamps of the clock."""

    action: Action
    start: object
    end: object


class Runner:
    """Runs a schedule's actions for the stages of this process, in exactly the order of the schedule.

    The losses of the micro-batches are divided by their number before their backward, so that gradients add up to the
    mini-batch's mean without another pass over them.
    """

    def __init__(
        self,
        schedule: Schedule,
        ranks: Sequence[int],
        stages: Sequence[LocalStage],
        loss: Loss,
        clock: Clock,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`ranks[i]` is the schedule's rank that process i of the group plays."""
        self._loss, self._clock = loss, clock
        self._num_microbatches = schedule.num_microbatches
        self._runs: list[_Run] = []
        self._arguments: Mapping[str, Sequence[Tensor]] = {}
        _check_types(stages)
        _check_input_grads(schedule, stages)
        held = [self._stage(stage, schedule.num_stages, device, group) for stage in stages]
        self._runtime = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            held, n_microbatches=schedule.num_microbatches, loss_fn=self._scaled_loss, scale_grads=False
        )
        self._runtime._prepare_schedule_with_comms(
            {i: [_Action.from_str(str(action)) for action in schedule.order[rank]] for i, rank in enumerate(ranks)}
        )
        if device.type == "cpu":
            _receive_early(self._runtime)

    def run(self, loaded: Sequence[Tensor], arguments: Mapping[str, Tensor], target: Tensor | None) -> Tensor | None:
        """Runs all micro-batches of a mini-batch, adding to the gradients; returns the mean loss on the last stage.

        `loaded` is what the first stage takes, `arguments` what later stages take by name.
        """
        self._runs.clear()
        self._arguments = {name: tensor.chunk(self._num_microbatches) for name, tensor in arguments.items()}
        losses: list[Tensor] = []
        self._runtime.step(*loaded, target=target, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    @property
    def order(self) -> tuple[Action, ...]:
        """The actions of the last run, in the order in which they ran."""
        return tuple(run.action for run in self._runs)

    def spans(self) -> tuple[tuple[Action, int, int], ...]:
        """Returns (action, start, end) of the last run, in nanoseconds of this process; waiting lies outside."""
        return tuple((run.action, self._clock.ns(run.start), self._clock.ns(run.end)) for run in self._runs)

    def _stage(
        self, stage: LocalStage, num_stages: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> PipelineStage:
        held = PipelineStage(
            stage.module,
            stage.index,
            num_stages,
            device,
            input_args=stage.received,
            output_args=stage.outputs,
            group=group,
        )
        if device.type == "cpu":  # before torch 2.13 a stage greets its neighbours first, itself included: gloo breaks
            held._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
        self._watch_forward(held, stage)
        self._watch_backward(held)
        self._watch_weight(held)
        return held

    def _watch_forward(self, held: PipelineStage, stage: LocalStage) -> None:
        inner = held.forward_one_chunk

        def forward(microbatch: int, args: tuple[Any, ...], kwargs: Any = None, **rest: Any) -> Any:
            own = {name: self._arguments[name][microbatch] for name in stage.arguments}
            return self._timed(stage.index, Phase.FORWARD, microbatch, lambda: inner(microbatch, args, own, **rest))

        held.forward_one_chunk = forward  # type: ignore[method-assign, assignment]

    def _watch_backward(self, held: PipelineStage) -> None:
        inner = held.backward_one_chunk

        def compute(microbatch: int, loss: Any, full_backward: bool, last_backward: bool) -> None:
            inner(microbatch, loss=loss, full_backward=full_backward, last_backward=last_backward)
            grads = held.bwd_cache[microbatch]
            if _EVERY_INPUT_HAS_A_GRADIENT and not held.is_first:
                grads = _filled(grads, [info.buffer for info in held.args_recv_info[microbatch]])
            held.bwd_cache[microbatch] = tuple(grad if grad is None else grad.contiguous() for grad in grads)

        def backward(
            microbatch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> None:
            phase = Phase.BACKWARD if full_backward else Phase.INPUT_GRAD
            self._timed(
                held.stage_index, phase, microbatch, lambda: compute(microbatch, loss, full_backward, last_backward)
            )

        held.backward_one_chunk = backward  # type: ignore[method-assign, assignment]

    def _watch_weight(self, held: PipelineStage) -> None:
        inner = held.backward_weight_one_chunk

        def weight(microbatch: int, last_backward: bool = False) -> None:
            self._timed(
                held.stage_index,
                Phase.WEIGHT_GRAD,
                microbatch,
                lambda: inner(microbatch, last_backward=last_backward),
            )

        held.backward_weight_one_chunk = weight  # type: ignore[method-assign, assignment]

    def _timed(self, stage: int, phase: Phase, microbatch: int, call: Callable[[], Any]) -> Any:
        start = self._clock.stamp()
        result = call()
        self._runs.append(_Run(Action(stage, phase, microbatch), start, self._clock.stamp()))
        return result

    def _scaled_loss(self, output: Any, target: Tensor) -> Tensor:
        """The loss is a layer of the last stage, whose F this lengthens."""
        loss = self._loss(output, target)
        if loss.dim():
            raise BapipeError(f"the loss must be a scalar, the mean over the batch; it has shape {tuple(loss.shape)}")
        scaled = loss / self._num_microbatches
        self._runs[-1].end = self._clock.stamp()
        return scaled


def _filled(grads: Sequence[Tensor | None], received: Sequence[Any]) -> tuple[Tensor, ...]:
    """Returns the gradients of what a stage received, zero where there is none."""
    pairs = zip(grads[: len(received)], received, strict=True)
    return tuple(torch.zeros_like(tensor) if grad is None else grad for grad, tensor in pairs)


def _check_types(stages: Sequence[LocalStage]) -> None:
    for stage in stages:
        for tensor in stage.received if _EVERY_INPUT_HAS_A_GRADIENT and stage.index else ():
            if not tensor.is_floating_point():
                raise BapipeError(
                    f"stage {stage.index} receives a tensor of {str(tensor.dtype).removeprefix('torch.')}, which torch "
                    f"{torch.__version__} cannot pass between stages: use torch 2.13 or later, or plan another cut"
                )


def _check_input_grads(schedule: Schedule, stages: Sequence[LocalStage]) -> None:
    """Torch's W starts where I stopped, so a stage that has nothing to do in I would lose its gradients."""
    split = {action.stage for actions in schedule.order for action in actions if action.phase is Phase.INPUT_GRAD}
    for stage in stages:
        if stage.index == 0 or stage.index not in split:
            continue
        reason = "receives nothing that needs a gradient" if not any(t.requires_grad for t in stage.received) else ""
        if _EVERY_INPUT_HAS_A_GRADIENT and stage.arguments:
            reason = f"loads inputs of the model, for which torch {torch.__version__} is wrong"
        if reason:
            raise BapipeError(
                f"stage {stage.index} {reason}, so its backward cannot be split into I and W: plan with a schedule of "
                "whole backwards, such as 1f1b"
            )


def _receive_early(runtime: _PipelineScheduleRuntime) -> None:
    """Posts every receive at the start of the step, in the order of the peers' sends.

    Each has a buffer of its own, and gloo starts a transfer only when both ends are posted: a transfer to a busy rank
    then overlaps what that rank computes. NCCL queues what one pair exchanges, so there torch's places are kept.
    """
    for rank, actions in runtime.pipeline_order_with_comms.items():
        receives = [action for action in actions if action.computation_type in _RECEIVES]
        others = [action for action in actions if action.computation_type not in _RECEIVES]
        runtime.pipeline_order_with_comms[rank] = receives + others
