"""torch's pipeline runtime; the executor explains what each change is for."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

from bapipe.torch_private.split_backward import stage_backward_weight
from bapipe.torch_private.torch_version import is_before_2_13

PIPELINE_LOG = "torch.distributed.pipelining.schedules"
"""Where torch writes whole schedules if an action fails."""


def stage_class() -> "type[PipelineStage]":
    """Returns the class of a stage for torch's runtime."""
    if is_before_2_13():
        from bapipe.torch_private.older import OlderStage

        return OlderStage
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage


def use_stage_backward_weight(stage: "PipelineStage") -> None:
    """Lets a stage of torch's runtime run W by `stage_backward_weight`."""
    original = stage.backward_maybe_with_nosync

    def backward(backward_type: str, arguments: dict[str, Any], last_backward: bool = False) -> Any:
        if backward_type != "weight":
            return original(backward_type, arguments, last_backward)
        stage_backward_weight(stage.submod.parameters(), arguments["param_groups"])
        return (), None

    stage.backward_maybe_with_nosync = backward  # type: ignore[method-assign, assignment]


def pipeline_runtime(stages: "Sequence[PipelineStage]", num_microbatches: int, loss: Callable[..., Tensor]) -> Any:
    """Returns torch's runtime, which executes lowered actions one after another; it does not scale gradients."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    return _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        list(stages), n_microbatches=num_microbatches, loss_fn=loss, scale_grads=False
    )


def set_lowered_order(runtime: Any, order: Mapping[int, Sequence[str]]) -> None:
    """Sets the lowered actions of each process."""
    from torch.distributed.pipelining.schedules import _Action

    runtime.pipeline_order_with_comms = {
        process: [_Action.from_str(action) for action in actions] for process, actions in order.items()
    }


def replace_losses(runtime: Any, loss_of: Callable[[int], Tensor]) -> None:
    """Makes the runtime take the loss of a micro-batch from `loss_of`.

    torch finds losses by their order of arrival and wants all micro-batches; a replica has some of them only.
    """
    runtime._maybe_get_loss = lambda stage, microbatch: loss_of(microbatch) if stage.is_last else None
    runtime._update_losses = lambda stages, losses: runtime._internal_losses.clear()


def skip_warmup(runtime: Any) -> None:
    """Removes the messages that stages exchange with their neighbours before the first step.

    They would connect processes in a group that carries nothing else, and greet the wrong replica of a stage, or, if
    neighbours are on one process, this one.
    """
    from torch.distributed.pipelining import _utils

    def skip(stages: "Sequence[PipelineStage]", *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC  # what the warm-up would find: shapes are known

    runtime._warmup_p2p = skip  # since torch 2.13
    for stage in runtime._stages:
        stage._get_init_p2p_neighbors_ops = list  # before


def keep_used_buffers(runtime: Any, receives: Callable[[int, int, int], bool]) -> None:
    """Lets a runtime keep the receive buffers only that it uses.

    `receives(stage, sender, microbatch)` says whether this process receives a micro-batch of a stage from another one,
    which runs the stage `sender`. torch allocates the buffers of all micro-batches, also of those that other replicas
    run, and for tensors that do not leave this process.
    """
    allocate = runtime._initialize_stages

    def initialize(*args: Any, **kwargs: Any) -> None:
        allocate(*args, **kwargs)
        for stage in runtime._stages:
            number = stage.stage_index
            for sender, received in ((number - 1, stage.args_recv_info), (number + 1, stage.grad_recv_info)):
                for microbatch in received:
                    if not receives(number, sender, microbatch):
                        drop_received(received[microbatch])

    runtime._initialize_stages = initialize


def drop_received(infos: Any) -> None:
    """Drops the tensors of a micro-batch that a stage received."""
    for info in infos:
        info.buffer = None


def drop_gradients_of_received(infos: Any) -> None:
    """Drops the gradients of the tensors of a micro-batch that a stage received, which torch keeps after I."""
    for info in infos:
        buffer = getattr(info, "buffer", None)  # none of the model's inputs
        if buffer is not None:
            buffer.grad = None
