"""A schedule on torch's pipeline runtime: the only file that uses names torch does not promise to keep."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, _utils
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _RecvInfo

from bapipe.errors import BapipeError
from bapipe.runtime.clock import Clock
from bapipe.runtime.lowering import lower_schedule, receives_at_step_start
from bapipe.runtime.recompute import RecomputedStage
from bapipe.runtime.rng import PerOperatorRng
from bapipe.schedules.table import Action, Phase, Schedule

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
        recompute: F keeps only its inputs, and B or I runs it again.
        last_backward: what to enter while the stage's gradients on this rank become final.
    """

    index: int
    module: nn.Module
    received: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    arguments: tuple[str, ...] = ()
    recompute: bool = False
    last_backward: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(slots=True)
class _Run:
    """An action that ran, by stamps of the clock."""

    action: Action
    start: object
    end: object


class ScheduleExecutor:
    """Runs a schedule's actions for the stages of this process, in exactly the order of the schedule.

    The losses of the micro-batches are divided by their number before their backward, so that gradients add up to the
    mini-batch's mean without another pass over them; and multiplied by `loss_scale`.
    """

    def __init__(
        self,
        schedule: Schedule,
        ranks: Sequence[int],
        stages: Sequence[LocalStage],
        loss: Loss,
        clock: Clock,
        draws: PerOperatorRng,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`ranks[i]` is the schedule's rank that process i of the group plays."""
        self._loss, self._clock, self._draws = loss, clock, draws
        self.loss_scale = 1.0
        self._schedule, self._ranks = schedule, ranks
        self._runs: list[_Run] = []
        self._arguments: Mapping[str, Sequence[Tensor]] = {}
        self._targets: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self._loss_again = any(stage.recompute and stage.index == schedule.num_stages - 1 for stage in stages)
        _check_types(stages)
        _check_input_grads(schedule, stages)
        self._final = _final_backwards(schedule.order[ranks[dist.get_rank(group)]])
        held = [self._stage(stage, device, group) for stage in stages]
        self._runtime = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            held, n_microbatches=schedule.num_microbatches, loss_fn=self._scaled_loss, scale_grads=False
        )
        for one in held:
            one.stage_index_to_group_rank = self._places(0)  # for torch's greetings
        self._find_losses_by_microbatch()
        lowered = lower_schedule(schedule)
        if device.type == "cpu":
            lowered = tuple(map(receives_at_step_start, lowered))
        self._runtime.pipeline_order_with_comms = {
            i: [_Action.from_str(action) for action in lowered[rank]] for i, rank in enumerate(ranks)
        }
        if any(len(devices) > 1 for devices in schedule.devices):
            self._serve_replicas()

    def run(self, loaded: Sequence[Tensor], arguments: Mapping[str, Tensor], target: Tensor | None) -> Tensor | None:
        """Runs this rank's micro-batches of a mini-batch, adding to the gradients.

        `loaded` is what the first stage takes, `arguments` what later stages take by name. Returns this rank's part of
        the mean loss, scaled, on the last stage, None elsewhere.
        """
        self._runs.clear()
        self._losses.clear()
        self._arguments = {name: tensor.chunk(self._schedule.num_microbatches) for name, tensor in arguments.items()}
        self._runtime.step(*loaded, target=target, return_outputs=False)
        if target is None:
            return None
        return torch.stack([torch.zeros_like(target, dtype=torch.float32).sum(), *self._losses.values()]).sum()

    @property
    def order(self) -> tuple[Action, ...]:
        """The actions of the last run, in the order in which they ran."""
        return tuple(run.action for run in self._runs)

    def spans(self) -> tuple[tuple[Action, int, int], ...]:
        """Returns (action, start, end) of the last run, in nanoseconds of this process; waiting lies outside."""
        return tuple((run.action, self._clock.ns(run.start), self._clock.ns(run.end)) for run in self._runs)

    def _stage(self, stage: LocalStage, device: torch.device, group: dist.ProcessGroup | None) -> PipelineStage:
        num_stages = self._schedule.num_stages
        held = PipelineStage(
            RecomputedStage(stage.module, device) if stage.recompute else stage.module,
            stage.index,
            max(num_stages, dist.get_world_size(group)),  # torch wants no more ranks than stages
            device,
            input_args=stage.received,
            output_args=stage.outputs,
            group=group,
        )
        held.num_stages = num_stages
        if device.type == "cpu":  # before torch 2.13 a stage greets its neighbours first, itself included: gloo breaks
            held._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
        for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            self._direct(held, name)
        again = self._recompute(held, stage) if stage.recompute else None
        self._watch_forward(held, stage)
        self._watch_backward(held, stage, again)
        self._watch_weight(held, stage)
        return held

    def _direct(self, held: PipelineStage, name: str) -> None:
        """Lets torch find the neighbours that have the micro-batch it sends or receives."""
        inner = getattr(held, name)

        def exchange(microbatch: int) -> Any:
            held.stage_index_to_group_rank = self._places(microbatch)
            return inner(microbatch)

        setattr(held, name, exchange)

    def _places(self, microbatch: int) -> dict[int, int]:
        """Returns the process that runs a micro-batch on each stage."""
        schedule = self._schedule
        return {s: self._ranks.index(schedule.rank_of(s, microbatch)) for s in range(schedule.num_stages)}

    def _recompute(self, held: PipelineStage, stage: LocalStage) -> Callable[[int], Tensor | None]:
        """Makes F keep its inputs only; returns what runs it again, and gives the loss on the last stage."""
        module, inner, send = held.submod, held.forward_one_chunk, held.get_fwd_send_ops
        assert isinstance(module, RecomputedStage)
        given: dict[int, tuple[Any, Any]] = {}

        def forward(microbatch: int, args: tuple[Any, ...], kwargs: Any = None, **rest: Any) -> Any:
            given[microbatch] = args, kwargs
            output = module.first(microbatch, lambda: inner(microbatch, args, kwargs, **rest))
            if held.is_last:
                drop_outputs(microbatch)
            return output

        def sent(microbatch: int) -> Any:
            ops = send(microbatch)
            drop_outputs(microbatch)
            return ops

        def drop_outputs(microbatch: int) -> None:
            held.fwd_cache[microbatch] = ((), held.fwd_cache[microbatch][1])

        def again(microbatch: int) -> Tensor | None:
            args, kwargs = given.pop(microbatch)
            with module.again(microbatch):
                output = inner(microbatch, args, kwargs, save_forward_output=False)
                return self._share(output, self._targets.pop(microbatch)) if held.is_last else None

        held.forward_one_chunk = forward  # type: ignore[method-assign, assignment]
        held.get_fwd_send_ops = sent  # type: ignore[method-assign, assignment]
        return again

    def _watch_forward(self, held: PipelineStage, stage: LocalStage) -> None:
        inner = held.forward_one_chunk

        def forward(microbatch: int, args: tuple[Any, ...], kwargs: Any = None, **rest: Any) -> Any:
            own = {name: self._arguments[name][microbatch] for name in stage.arguments}
            return self._timed(stage.index, Phase.FORWARD, microbatch, lambda: inner(microbatch, args, own, **rest))

        held.forward_one_chunk = forward  # type: ignore[method-assign, assignment]

    def _watch_backward(
        self, held: PipelineStage, stage: LocalStage, again: Callable[[int], Tensor | None] | None
    ) -> None:
        inner = held.backward_one_chunk

        def compute(microbatch: int, loss: Any, full_backward: bool, last_backward: bool) -> None:
            if again is not None:
                loss = again(microbatch)
            inner(microbatch, loss=loss, full_backward=full_backward, last_backward=last_backward)
            grads = held.bwd_cache[microbatch]
            if _EVERY_INPUT_HAS_A_GRADIENT and not held.is_first:
                grads = _filled(grads, [info.buffer for info in held.args_recv_info[microbatch]])
            held.bwd_cache[microbatch] = tuple(grad if grad is None else grad.contiguous() for grad in grads)

        def backward(
            microbatch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> None:
            phase = Phase.BACKWARD if full_backward else Phase.INPUT_GRAD
            self._last_or_not(stage, phase, microbatch, lambda: compute(microbatch, loss, full_backward, last_backward))

        held.backward_one_chunk = backward  # type: ignore[method-assign, assignment]

    def _watch_weight(self, held: PipelineStage, stage: LocalStage) -> None:
        inner = held.backward_weight_one_chunk

        def weight(microbatch: int, last_backward: bool = False) -> None:
            self._last_or_not(
                stage, Phase.WEIGHT_GRAD, microbatch, lambda: inner(microbatch, last_backward=last_backward)
            )

        held.backward_weight_one_chunk = weight  # type: ignore[method-assign, assignment]

    def _last_or_not(self, stage: LocalStage, phase: Phase, microbatch: int, call: Callable[[], None]) -> None:
        if self._final[stage.index] == Action(stage.index, phase, microbatch):
            with stage.last_backward():
                self._timed(stage.index, phase, microbatch, call)
        else:
            self._timed(stage.index, phase, microbatch, call)

    def _timed(self, stage: int, phase: Phase, microbatch: int, call: Callable[[], Any]) -> Any:
        self._draws.microbatch = microbatch
        start = self._clock.stamp()
        result = call()
        self._runs.append(_Run(Action(stage, phase, microbatch), start, self._clock.stamp()))
        return result

    def _scaled_loss(self, output: Any, target: Tensor) -> Tensor:
        """The loss is a layer of the last stage, whose F this lengthens."""
        run = self._runs[-1]
        with torch.no_grad() if self._loss_again else nullcontext():
            share = self._share(output, target)
        if self._loss_again:
            self._targets[run.action.microbatch] = target
        self._losses[run.action.microbatch] = share
        run.end = self._clock.stamp()
        return share

    def _share(self, output: Any, target: Tensor) -> Tensor:
        """Returns a micro-batch's part of the mean loss, scaled."""
        loss = self._loss(output, target)
        if loss.dim():
            raise BapipeError(f"the loss must be a scalar, the mean over the batch; it has shape {tuple(loss.shape)}")
        share = loss / self._schedule.num_microbatches
        return share if self.loss_scale == 1.0 else share * self.loss_scale

    def _find_losses_by_microbatch(self) -> None:
        """Torch finds losses by their order of arrival, and wants all of them."""
        runtime: Any = self._runtime
        runtime._maybe_get_loss = lambda stage, microbatch: self._losses[microbatch] if stage.is_last else None
        runtime._update_losses = lambda stages, losses: runtime._internal_losses.clear()

    def _serve_replicas(self) -> None:
        """Leaves out torch's greetings, which know one rank a stage, and buffers for others' micro-batches."""
        runtime: Any = self._runtime
        inner = runtime._initialize_stages
        own = {(action.stage, action.microbatch) for action in self._schedule.order[self._ranks[runtime.rank]]}

        def greet(stages: Sequence[PipelineStage], *_: Any) -> None:
            for stage in stages:
                stage._inference_mode = _utils.InferenceMode.STATIC

        def initialize(*args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)
            for stage in runtime._stages:
                for infos in (stage.args_recv_info, stage.grad_recv_info):
                    for microbatch, received in infos.items():
                        for info in received if (stage.stage_index, microbatch) not in own else ():
                            info.buffer = None

        runtime._warmup_p2p = greet
        runtime._initialize_stages = initialize
        for stage in runtime._stages:
            stage._get_init_p2p_neighbors_ops = list


def subgroup(members: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """Returns a group of some processes, which waits as long as the default group; every process calls it together."""
    whole = dist.distributed_c10d._get_default_group()
    made: dist.ProcessGroup = dist.new_group(list(members), timeout=whole._get_backend(device).options._timeout)
    return made


def _final_backwards(order: Sequence[Action]) -> dict[int, Action]:
    """Returns the action after which each stage's gradients on a rank are final."""
    return {action.stage: action for action in order if action.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD)}


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
