"""What bapipe changes in torch 2.11 and 2.12, by their private names; loaded with these versions only.

Before torch 2.13

- I kept only those nodes' gradients of which W added up all outputs: wrong gradients, without an error;
- W could not begin at a node of an `autograd.Function` (`split_backward.can_begin_at`);
- a stage had to receive floats, and sent a gradient back for each;
- tensors had to have the strides with which the stage was described.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups

Kept = list[tuple[Tensor | None, ...]]
"""The gradients that arrived at each node at which a W begins, by output of the node."""


def stage_backward_input(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None] | None,
    inputs: Sequence[Any],
    weights: Iterable[nn.Parameter],
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """Runs I from the outputs of a stage, or its loss, and adds to the gradients of its inputs.

    Returns:
        The gradient of each input, None where there is none; and the groups of weights for `stage_backward_weight`.
    """
    used = [i for i, output in enumerate(outputs) if output.requires_grad]
    given = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
    groups = get_param_groups(
        [get_gradient_edge(inputs[i]).node for i in given],
        [get_gradient_edge(weight).node for weight in weights if weight.requires_grad],
        construct_reverse_graph([get_gradient_edge(outputs[i]).node for i in used]),
    )
    input_grads: list[Tensor | None] = [None] * len(inputs)
    with ExitStack() as hooks:
        for group in groups:
            nodes = list(group["intermediates"])
            kept: Kept = [()] * len(nodes)
            group |= {"intermediates": nodes, "grads": kept}
            for index, node in enumerate(nodes):
                hooks.callback(node.register_prehook(_keep(kept, index)).remove)
        if used and given:
            found = torch.autograd.grad(
                [outputs[i] for i in used],
                [inputs[i] for i in given],
                [torch.ones_like(outputs[i]) if grads is None else grads[i] for i in used],
                retain_graph=True,
                allow_unused=True,
            )
            for i, grad in zip(given, found, strict=True):
                input_grads[i] = grad
                if grad is not None:
                    inputs[i].grad = grad if inputs[i].grad is None else inputs[i].grad.add_(grad)
    for output in outputs:  # what leads from them to the nodes is not needed any more
        if not output._is_view():  # which cannot be detached in place
            output.detach_()
    return tuple(input_grads), groups


def _keep(kept: Kept, index: int) -> Callable[[tuple[Tensor | None, ...]], None]:
    def keep(grads: tuple[Tensor | None, ...]) -> None:
        kept[index] = grads

    return keep


class OlderStage(PipelineStage):
    """torch's stage, with what it lacks before torch 2.13."""

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        input_args: tuple[Tensor, ...],
        output_args: tuple[Tensor, ...],
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(
            submodule, stage_index, num_stages, device, input_args=input_args, output_args=output_args, group=group
        )
        self._input_requires_grad = [tensor.requires_grad for tensor in input_args]
        self._output_requires_grad = [tensor.requires_grad for tensor in output_args]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Allocates the tensors to receive; those without a gradient need none, and may be of any type."""
        has_backward, self.has_backward = self.has_backward, False
        outputs = super()._prepare_forward_infra(*args, **kwargs)
        self.has_backward = has_backward
        if has_backward and not self.is_first:
            received: Any = self.args_recv_info
            for infos in received.values():
                for info, requires_grad in zip(infos, self._input_requires_grad, strict=True):
                    info.buffer.requires_grad_(requires_grad)
        return outputs

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        infos = super()._create_grad_recv_info(act_send_info)
        for info, requires_grad in zip(infos, self._output_requires_grad, strict=False):  # the last stage has no infos
            if not requires_grad:
                info.buffer = None
        return infos

    def _get_recv_ops(self, recv_infos: Any) -> list[dist.P2POp]:
        return super()._get_recv_ops(tuple(info for info in recv_infos if info.buffer is not None))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        infos = self.args_recv_info[mb_index]
        for info, tensor, requires_grad in zip(infos, prev_stage_outputs, self._input_requires_grad, strict=True):
            info.buffer = tensor.detach().requires_grad_(requires_grad)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        infos = self.grad_recv_info[mb_index]
        for info, grad in zip(infos, next_stage_bwd_outputs, strict=False):  # some of model inputs loaded there follow
            is_zero = grad is None and info.buffer is not None
            info.buffer = torch.zeros_like(info.buffer) if is_zero else grad

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends the gradients that the stage before waits for, zeros for those that its outputs do not need."""
        if self.is_first:
            return []
        received: Any = self.args_recv_info[bwd_chunk_id]
        grads = self.bwd_cache[bwd_chunk_id][: len(received)]  # those of model inputs that are loaded here follow
        sent = tuple(
            torch.zeros_like(info.buffer) if grad is None else grad
            for info, grad, requires_grad in zip(received, grads, self._input_requires_grad, strict=True)
            if requires_grad
        )
        self.bwd_cache[bwd_chunk_id], self.grad_send_info = sent, [self.stage_index - 1] * len(sent)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def clear_runtime_states(self) -> None:
        """As in torch, but for the tensors of micro-batches that a replica does not run."""
        received = () if self.is_first else self.args_recv_info.values()
        others = [info for infos in received for info in infos if info.buffer is None]
        for info in others:
            info.buffer = torch.empty(0)
        super().clear_runtime_states()
        for info in others:
            info.buffer = None

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        weights = self.submod.parameters()
        if backward_type == "input":
            return stage_backward_input(
                bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"], weights
            )
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _validate_fwd_input(self, *_: Any) -> None:
        """Checks nothing: what stages pass on is checked by `bapipe.runtime.local_stage.check_outputs`."""

    _validate_fwd_outputs = _validate_fwd_input
