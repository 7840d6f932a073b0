"""Runs the lowered schedule of a plan on torch's pipeline runtime, for the stages of this process.

The runtime executes actions one after another (F, B, I, W, sends and receives); this file sets their order, and wraps
methods of torch's stages. Each wrapper says why it is needed; torch's private names are in `torch_private`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from bapipe.equivalence.outcome import check_scalar
from bapipe.errors import BapipeError, LayerFailed, one_line
from bapipe.module_state.backward_state import BackwardState
from bapipe.runtime.clock import Clock
from bapipe.runtime.collectives_check import FirstForwards, action_checked
from bapipe.runtime.local_stage import LocalStage, check_gradients_of_outputs, check_outputs
from bapipe.runtime.loss_weights import LossWeights
from bapipe.runtime.lowering import End, Transfer, finished_sends, lower_for
from bapipe.runtime.model_errors import model_errors
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.runtime.recompute import RecomputedStage
from bapipe.runtime.rng import PerOperatorRng
from bapipe.runtime.transfers import Channels, Transfers
from bapipe.runtime.whole_backward import can_split, has_hooks_of_the_model
from bapipe.schedules.table import Action, Phase
from bapipe.torch_private.measuring import without_log
from bapipe.torch_private.pipeline_runtime import (
    PIPELINE_LOG,
    drop_gradients_of_received,
    drop_received,
    keep_used_buffers,
    pipeline_runtime,
    replace_losses,
    set_lowered_order,
    skip_warmup,
    stage_class,
    use_stage_backward_weight,
)


@dataclass(slots=True)
class _TimedAction:
    """An action that ran, with the clock's stamps of its start and end."""

    action: Action
    start: object
    end: object


class ScheduleExecutor:
    """Runs a schedule's actions for the stages of this process, in exactly the order of the schedule.

    The loss of each micro-batch is divided by the number of micro-batches before its backward, so that the gradients
    add up to those of the mini-batch's mean loss without another pass over them. It is also multiplied by `loss_scale`.
    """

    def __init__(
        self,
        layout: ProcessLayout,
        stages: Sequence[LocalStage],
        *,
        channels: Channels,
        loss: nn.Module,
        weights: LossWeights,
        clock: Clock,
        rng: PerOperatorRng,
    ) -> None:
        self._layout, self._schedule = layout, layout.schedule
        self._weights, self._clock, self._rng = weights, clock, rng
        self.loss_scale = 1.0
        self._ran: list[_TimedAction] = []  # in the last step
        self._arguments: Mapping[str, Sequence[Tensor]] = {}  # by name, a chunk per micro-batch
        self._targets: dict[int, Tensor] = {}  # by micro-batch, kept for a recomputed last stage
        self._losses: dict[int, Tensor] = {}  # by micro-batch
        self._whole: set[tuple[int, int]] = set()  # (stage, micro-batch) whose I ran the whole backward
        self._deferred: dict[tuple[int, int], Callable[[], None]] = {}  # whole backwards, for W to run
        self._have_hooks: dict[int, bool] = {}  # by stage; asked once a step, as hooks may be added between steps
        self._states = {stage.index: BackwardState([*stage.module.modules()]) for stage in stages}
        self._first_forwards = FirstForwards(layout.group)
        last = self._schedule.num_stages - 1
        self._recomputing_last = next((stage for stage in stages if stage.recompute and stage.index == last), None)
        self._loss = loss if self._recomputing_last is None else RecomputedStage(loss, layout.device)
        own_order = self._schedule.order[layout.rank]
        self._final_backward = _final_backwards(own_order)
        self._channels = channels
        self._transfers = Transfers(channels, finished_sends(self._schedule, layout.rank))
        torch_stages = [self._torch_stage(stage) for stage in stages]
        self._runtime = pipeline_runtime(torch_stages, self._schedule.num_microbatches, self._scaled_loss)
        skip_warmup(self._runtime)
        replace_losses(self._runtime, self._losses.__getitem__)
        set_lowered_order(self._runtime, self._lowered_order())
        keep_used_buffers(self._runtime, self._receives)

    def run(self, loaded: Sequence[Tensor], arguments: Mapping[str, Tensor], target: Tensor | None) -> Tensor | None:
        """Runs this rank's actions for a mini-batch, adding to the gradients.

        `loaded` are the inputs of the first stage, `arguments` those that later stages take by name. Returns this
        rank's part of the mean loss, multiplied by `loss_scale`, on ranks of the last stage, None elsewhere.
        """
        self._channels.begin()
        self._ran.clear()
        self._losses.clear()
        self._whole.clear()
        self._deferred.clear()
        self._have_hooks.clear()
        for state in self._states.values():
            state.begin_step()
        self._arguments = {name: tensor.chunk(self._schedule.num_microbatches) for name, tensor in arguments.items()}
        if target is not None:
            self._weights.begin(target, self._schedule.num_microbatches)
        with without_log(PIPELINE_LOG):
            self._runtime.step(*loaded, target=target, return_outputs=False)
            self._transfers.release_all()
        if target is None:
            return None
        zero = torch.zeros((), dtype=torch.float32, device=target.device)  # a replica may have run no micro-batch
        return torch.stack([zero, *self._losses.values()]).sum()

    @property
    def order(self) -> tuple[Action, ...]:
        """The actions of the last run, in the order in which they ran."""
        return tuple(timed.action for timed in self._ran)

    def spans(self) -> tuple[tuple[Action, int, int], ...]:
        """Returns (action, start, end) of the last run, in nanoseconds of this process; waiting is not included."""
        return tuple((timed.action, self._clock.ns(timed.start), self._clock.ns(timed.end)) for timed in self._ran)

    def _lowered_order(self) -> dict[int, Sequence[str]]:
        """Returns the lowered actions of each process of the group, as torch writes them."""
        lowered = lower_for(self._schedule, gloo=self._layout.uses_gloo)
        return {process: [*map(str, lowered[rank])] for process, rank in enumerate(self._layout.ranks)}

    def _process_of_stage(self, microbatch: int) -> dict[int, int]:
        """Returns, by stage, the process of the group that runs a micro-batch of the stage."""
        return {s: self._layout.process_of(s, microbatch) for s in range(self._schedule.num_stages)}

    def _receives(self, stage: int, sender: int, microbatch: int) -> bool:
        """Returns whether this process, in `stage`, receives a micro-batch from stage `sender` on another process."""
        if not 0 <= sender < self._schedule.num_stages:
            return False
        here = self._layout.rank
        return self._schedule.rank_of(stage, microbatch) == here != self._schedule.rank_of(sender, microbatch)

    # Each wrapper below replaces a method of torch's stage by one that calls it. They are stacked in this order, the
    # innermost first: routing, sending, recomputation, inputs that a later stage loads, timing.

    def _torch_stage(self, stage: LocalStage) -> PipelineStage:
        num_stages, device, group = self._schedule.num_stages, self._layout.device, self._layout.group
        torch_stage = stage_class()(
            RecomputedStage(stage.module, device) if stage.recompute else stage.module,
            stage.index,
            max(num_stages, dist.get_world_size(group)),  # torch refuses more ranks than stages, as with replicas
            device,
            input_args=stage.received,
            output_args=stage.outputs,
            group=group,
        )
        torch_stage.num_stages = num_stages
        use_stage_backward_weight(torch_stage)
        self._post_here(torch_stage, "get_fwd_recv_ops", End.RECEIVE, is_forward=True)
        self._post_here(torch_stage, "get_fwd_send_ops", End.SEND, is_forward=True)
        self._post_here(torch_stage, "get_bwd_recv_ops", End.RECEIVE, is_forward=False)
        self._post_here(torch_stage, "get_bwd_send_ops", End.SEND, is_forward=False)
        recompute = self._recompute_forward(torch_stage, stage) if stage.recompute else None
        self._wrap_forward(torch_stage, stage)
        self._wrap_backward(torch_stage, stage, recompute)
        self._wrap_weight(torch_stage, stage)
        self._fill_local_gradients(torch_stage, stage)
        return torch_stage

    def _post_here(self, torch_stage: PipelineStage, name: str, end: End, *, is_forward: bool) -> None:
        """Replaces a method that returns a stage's sends or receives by one that posts them, and returns none.

        The peers are the replicas that run the micro-batch. The runtime would keep the tensors of sends until the step
        ends, and post all transfers in one process group instead of `Channels`.
        """
        original, stage = getattr(torch_stage, name), torch_stage.stage_index

        def posted(microbatch: int) -> list[dist.P2POp]:
            torch_stage.stage_index_to_group_rank = self._process_of_stage(microbatch)
            operations: list[Any] = original(microbatch)
            tensors = [(operation.tensor, operation.group_peer) for operation in operations]
            self._transfers.post(Transfer(stage, end, is_forward, microbatch), tensors)
            return []

        setattr(torch_stage, name, posted)

    def _recompute_forward(self, torch_stage: PipelineStage, stage: LocalStage) -> Callable[[int], Tensor | None]:
        """Makes F keep only its inputs; returns a function that runs the F of a micro-batch again.

        That function returns the loss on the last stage, None on others. The first F runs without an autograd graph.
        Its outputs are dropped when they have been sent, or, on the last stage, when the loss has been computed from
        them.
        """
        module, original, get_send_ops = torch_stage.submod, torch_stage.forward_one_chunk, torch_stage.get_fwd_send_ops
        assert isinstance(module, RecomputedStage)
        inputs_of: dict[int, tuple[Any, Any]] = {}

        def forward(microbatch: int, args: tuple[Any, ...], kwargs: Any = None, **options: Any) -> Any:
            inputs_of[microbatch] = args, kwargs
            output = module.first(microbatch, lambda: original(microbatch, args, kwargs, **options))
            if torch_stage.is_last:
                drop_outputs(microbatch)
            return output

        def send_then_drop(microbatch: int) -> Any:
            ops = get_send_ops(microbatch)
            drop_outputs(microbatch)
            return ops

        def drop_outputs(microbatch: int) -> None:
            torch_stage.fwd_cache[microbatch] = ((), torch_stage.fwd_cache[microbatch][1])

        def recompute(microbatch: int) -> Tensor | None:
            args, kwargs = inputs_of.pop(microbatch)
            with module.recomputing(microbatch):
                output = original(microbatch, args, kwargs, save_forward_output=False)
            if not torch_stage.is_last:
                check_gradients_of_outputs(stage, output)  # the first F had no graph
                return None
            assert isinstance(self._loss, RecomputedStage)
            with self._loss.recomputing(microbatch):
                return self._loss_share(output, self._targets.pop(microbatch))

        torch_stage.forward_one_chunk = forward  # type: ignore[method-assign, assignment]
        torch_stage.get_fwd_send_ops = send_then_drop  # type: ignore[method-assign, assignment]
        return recompute

    def _wrap_forward(self, torch_stage: PipelineStage, stage: LocalStage) -> None:
        """Passes to F the model inputs that a later stage loads itself, and times it.

        torch would pass such inputs to all stages.
        """
        original = torch_stage.forward_one_chunk

        def forward(microbatch: int, args: tuple[Any, ...], kwargs: Any = None, **options: Any) -> Any:
            args = tuple(map(_with_own_version, args))
            loaded = {name: _with_own_version(self._arguments[name][microbatch]) for name in stage.arguments}
            action = Action(stage.index, Phase.FORWARD, microbatch)
            call = partial(original, microbatch, args, loaded, **options)
            errors = model_errors(action, stage.module, recompute=stage.recompute)
            kept = self._states[stage.index].forward(microbatch)
            with errors, self._first_forwards.checked(stage.index, stage.module), kept:
                output = self._timed(action, call)
            check_outputs(stage, output)
            return output

        torch_stage.forward_one_chunk = forward  # type: ignore[method-assign, assignment]

    def _wrap_backward(
        self, torch_stage: PipelineStage, stage: LocalStage, recompute: Callable[[int], Tensor | None] | None
    ) -> None:
        """Recomputes F before B or I, chooses whether I or W runs the whole backward, and times B or I."""
        original = torch_stage.backward_one_chunk
        sends_gradient = stage.index > 0 and any(tensor.requires_grad for tensor in stage.received)

        def is_whole(microbatch: int, loss: Any) -> bool:
            if stage.index not in self._have_hooks:
                self._have_hooks[stage.index] = has_hooks_of_the_model(stage.module)
            if self._have_hooks[stage.index]:
                return True
            outputs, inputs = torch_stage.fwd_cache[microbatch]
            return not can_split((loss,) if torch_stage.is_last else outputs, inputs, stage.module.parameters())

        def run(microbatch: int, full_backward: bool = True, **options: Any) -> None:
            with self._states[stage.index].backward(microbatch, is_last=full_backward):
                original(microbatch, full_backward=full_backward, **options)
            self._drop_received(torch_stage, microbatch)

        def compute(microbatch: int, loss: Any, full_backward: bool, last_backward: bool) -> None:
            if recompute is not None:
                loss = recompute(microbatch)
            if stage.before_backward is not None:
                stage.before_backward()
            is_split = not full_backward
            if is_split and sends_gradient and is_whole(microbatch, loss):
                is_split = False
                self._whole.add((stage.index, microbatch))
            if torch_stage.is_last:
                loss = self._released(torch_stage, microbatch, loss)
            if is_split and not sends_gradient:
                self._deferred[stage.index, microbatch] = partial(run, microbatch, loss=loss)
                torch_stage.bwd_cache[microbatch] = (None,) * len(stage.received)
            else:
                run(microbatch, loss=loss, full_backward=not is_split, last_backward=last_backward)
            grads = torch_stage.bwd_cache[microbatch]
            # gloo and NCCL send only contiguous tensors.
            contiguous = tuple(grad if grad is None else grad.contiguous() for grad in grads)
            torch_stage.bwd_cache[microbatch] = contiguous

        def backward(
            microbatch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
        ) -> None:
            phase = Phase.BACKWARD if full_backward else Phase.INPUT_GRAD
            call = partial(compute, microbatch, loss, full_backward, last_backward)
            self._timed_backward(stage, Action(stage.index, phase, microbatch), call)

        torch_stage.backward_one_chunk = backward  # type: ignore[method-assign, assignment]

    def _drop_received(self, torch_stage: PipelineStage, microbatch: int) -> None:
        """Drops activations and gradients that a backward has used, and that torch would keep until the next step.

        Buffers of receives from other processes stay, for the next messages.
        """
        stage = torch_stage.stage_index
        activations = torch_stage.args_recv_info[microbatch]
        if stage > 0:
            drop_gradients_of_received(activations)
            if not self._receives(stage, stage - 1, microbatch):
                drop_received(activations)
        if not torch_stage.is_last and not self._receives(stage, stage + 1, microbatch):
            drop_received(torch_stage.grad_recv_info[microbatch])

    def _fill_local_gradients(self, torch_stage: PipelineStage, stage: LocalStage) -> None:
        """Passes zeros for gradients that a next stage on this process does not have.

        torch would zero its receive buffer, but buffers without a receive have been dropped.
        """
        original, device = torch_stage.set_local_bwd_input, self._layout.device
        zeros = [partial(torch.zeros_like, x, device=device) if x.requires_grad else None for x in stage.outputs]

        def filled(grads: tuple[Tensor | None, ...], microbatch: int) -> None:
            pairs = zip_longest(grads, zeros[: len(grads)])  # gradients of model inputs loaded there may follow
            original(tuple(make() if grad is None and make is not None else grad for grad, make in pairs), microbatch)

        torch_stage.set_local_bwd_input = filled  # type: ignore[method-assign, assignment]

    def _released(self, torch_stage: PipelineStage, microbatch: int, loss: Tensor) -> Tensor:
        """Returns a copy of the loss, and drops the last stage's outputs, for torch to detach in place.

        After I torch detaches the loss and these outputs to free memory, but W may need what operators have saved of
        them.
        """
        torch_stage.fwd_cache[microbatch] = ((), torch_stage.fwd_cache[microbatch][1])
        self._losses[microbatch] = self._losses[microbatch].detach()
        return loss.clone()

    def _wrap_weight(self, torch_stage: PipelineStage, stage: LocalStage) -> None:
        original = torch_stage.backward_weight_one_chunk

        def compute(microbatch: int, last_backward: bool) -> None:
            if (stage.index, microbatch) in self._whole:
                self._whole.remove((stage.index, microbatch))
            elif (stage.index, microbatch) in self._deferred:
                self._deferred.pop((stage.index, microbatch))()
            else:
                with self._states[stage.index].backward(microbatch, is_last=True):
                    original(microbatch, last_backward=last_backward)

        def weight(microbatch: int, last_backward: bool = False) -> None:
            call = partial(compute, microbatch, last_backward)
            self._timed_backward(stage, Action(stage.index, Phase.WEIGHT_GRAD, microbatch), call)

        torch_stage.backward_weight_one_chunk = weight  # type: ignore[method-assign, assignment]

    def _timed_backward(self, stage: LocalStage, action: Action, call: Callable[[], None]) -> None:
        # torch's own `last_backward` counts all micro-batches of the schedule, of which a replica runs only some.
        is_last = self._final_backward[stage.index] == action
        errors = model_errors(action, stage.module, recompute=stage.recompute)
        with stage.last_backward() if is_last else nullcontext(), errors:
            self._timed(action, call)

    def _timed(self, action: Action, call: Callable[[], Any]) -> Any:
        self._transfers.before(action)
        self._rng.enter(action)
        start = self._clock.stamp()
        with action_checked(self._layout, action):
            result = call()
        self._ran.append(_TimedAction(action, start, self._clock.stamp()))
        return result

    def _scaled_loss(self, output: Any, target: Tensor) -> Tensor:
        """Returns a micro-batch's part of the scaled mean loss, detached.

        The runtime calls this right after F of the last stage; its time counts as that F's.
        """
        forward = self._ran[-1]
        microbatch = forward.action.microbatch
        if self._recomputing_last is None:
            share = self._loss_share(output, target)
        else:
            share = self._first_loss_share(self._recomputing_last, microbatch, output, target)
            self._targets[microbatch] = target
        self._losses[microbatch] = share
        forward.end = self._clock.stamp()
        return share.detach()  # the runtime keeps it until the step ends, and would keep the graph with it

    def _first_loss_share(self, stage: LocalStage, microbatch: int, output: Any, target: Tensor) -> Tensor:
        """Returns the detached part of the mean loss in the first F of a recomputed last stage.

        Its backward computes the loss again, with the same result. Here the loss gets copies of the outputs: it may
        change them in place, and the stage may have kept them. They require gradients where the outputs of the second
        run do, because the loss may ask whether they do.
        """
        assert isinstance(self._loss, RecomputedStage)
        with torch.enable_grad():
            copies = tuple(
                tensor.detach().requires_grad_(example.requires_grad).clone()
                for tensor, example in zip(output, stage.outputs, strict=True)
            )
            share = self._loss.remembering(microbatch, lambda: self._loss_share(copies, target))
        return share.detach()

    def _loss_share(self, output: Any, target: Tensor) -> Tensor:
        """Returns a micro-batch's part of the mini-batch's mean loss, multiplied by `loss_scale`."""
        self._rng.enter_loss()
        try:
            value = self._weights.computed(self._loss, output, target)
        except BapipeError:
            raise
        except Exception as error:  # whatever the loss raises, such as for labels that the model has no output for
            action = self._ran[-1].action
            raise LayerFailed(
                f"the loss of micro-batch {action.microbatch} fails: {one_line(error)[:200]}{_range(target)}"
            ) from error
        check_scalar(value)
        # In float32, as with torch's GradScaler: a scaled loss would exceed the largest float16, 65504.
        loss = value.to(torch.promote_types(value.dtype, torch.float32))
        share = loss / self._schedule.num_microbatches
        return share if self.loss_scale == 1.0 else share * self.loss_scale


def _with_own_version(value: Any) -> Any:
    """Returns a micro-batch of an input of the model, on the same memory, that counts writes to itself alone.

    All micro-batches are slices of one tensor, and torch counts their writes together: a layer that changes its input
    in place would seem to change what autograd has saved of earlier ones. One that requires gradients cannot be changed
    in place.
    """
    return value.data if isinstance(value, Tensor) and not value.requires_grad else value


def _range(target: Tensor) -> str:
    """Returns the range of labels in a target, in words; empty on a GPU, which cannot be read after a failed kernel."""
    if target.is_floating_point() or not target.numel() or target.device.type != "cpu":
        return ""
    return f"; its targets are {int(target.min())} to {int(target.max())}"


def _final_backwards(order: Sequence[Action]) -> dict[int, Action]:
    """Returns, by stage, the action of a rank's order after which the stage's gradients are final."""
    return {action.stage: action for action in order if action.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD)}
