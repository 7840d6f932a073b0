"""A stage of a pipeline and its cost on each of its devices: plain data."""

from dataclasses import dataclass

from bapipe.schedules.table import Phase
from bapipe.simulator.tied_weights import TiedGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """A stage on one of its devices, for one micro-batch.

    Attributes:
        forward_ns, input_grad_ns, weight_grad_ns: F, I and W; `input_grad_ns` contains a recomputed F. If the stage
            sends no gradient back, that is all of I, and W all the rest of a backward.
        whole_backward_ns: B, with a recomputed F; None if it is I + W.
        update_ns: the optimizer's update, once a step.
        param_bytes, optimizer_bytes: of parameters and buffers, and of optimizer state; they live all through the step,
            as gradients do.
        frozen_bytes: those of `param_bytes` that are not trained, and have no gradients.
        stash_bytes: activations kept from F to the end of the backward of a micro-batch.
        recomputed_bytes: those of the stash that only live during the backward if some layers are recomputed.
        gradient_stash_bytes: what I leaves for W, kept besides from I to the end of W.
        workspace_bytes: the maximum that one of its layers needs while it runs.
        gradient_done_ns: for each bucket, when its last gradient is done after the start of the stage's last B, and
            after the start of its last W.
    """

    forward_ns: int
    input_grad_ns: int
    weight_grad_ns: int
    whole_backward_ns: int | None = None
    update_ns: int = 0
    param_bytes: int = 0
    frozen_bytes: int = 0
    optimizer_bytes: int = 0
    stash_bytes: int = 0
    recomputed_bytes: int = 0
    gradient_stash_bytes: int = 0
    workspace_bytes: int = 0
    gradient_done_ns: tuple[tuple[int, int], ...] = ()

    @property
    def gradient_bytes(self) -> int:
        return self.param_bytes - self.frozen_bytes

    @property
    def backward_ns(self) -> int:
        split_ns = self.input_grad_ns + self.weight_grad_ns
        return split_ns if self.whole_backward_ns is None else self.whole_backward_ns

    @property
    def min_backward_ns(self) -> int:
        """The shorter of B, and I and W."""
        return min(self.backward_ns, self.input_grad_ns + self.weight_grad_ns)

    def ns(self, phase: Phase) -> int:
        """Returns the time of one phase."""
        match phase:
            case Phase.FORWARD:
                return self.forward_ns
            case Phase.BACKWARD:
                return self.backward_ns
            case Phase.INPUT_GRAD:
                return self.input_grad_ns
            case Phase.WEIGHT_GRAD:
                return self.weight_grad_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a pipeline.

    Attributes:
        costs: its cost on each of its replicas, in the order of `Schedule.devices`.
        num_members: the number of members of each of its devices, if they are groups.
        send_bytes, grad_bytes: activations of a micro-batch sent to the next stage, and their gradients sent back; 0
            for the last stage. As all bytes, those of one member.
        input_bytes, input_grad_bytes: activations of a micro-batch that come in, and their gradients sent back, as this
            stage's devices hold them; read only if the stage before has another number of members.
        bucket_bytes: gradients in each all-reduce, in the order in which they are done; empty for a single device.
        group_bucket_bytes: how many of them the members of the devices sum, too; empty for single devices.
        tied_gradients: gradients of tied weights that it sums with other stages.
        recompute: only the stage's input is kept; a whole stash lives during each backward.
        kept_tensor_bytes: if only some layers are recomputed, the tensors that are kept for that; else None.
    """

    costs: tuple[StageCost, ...]
    num_members: int = 1
    send_bytes: int = 0
    grad_bytes: int = 0
    input_bytes: int = 0
    input_grad_bytes: int = 0
    bucket_bytes: tuple[int, ...] = ()
    group_bucket_bytes: tuple[int, ...] = ()
    tied_gradients: tuple[TiedGradient, ...] = ()
    recompute: bool = False
    kept_tensor_bytes: int | None = None


def transferred_bytes(before: Stage, after: Stage) -> tuple[int, int]:
    """Returns the activations and the gradients of a micro-batch that one member's link carries between two stages.

    Between groups of unlike sizes it is the larger of what a member sends and what a member receives: the link of the
    smaller group carries it all.
    """
    if before.num_members == after.num_members:
        return before.send_bytes, before.grad_bytes
    return max(before.send_bytes, after.input_bytes), max(before.grad_bytes, after.input_grad_bytes)


def received_bytes(before: Stage, after: Stage) -> int:
    """Returns the activations of a micro-batch that a member of `after` receives from the stage before it."""
    return before.send_bytes if before.num_members == after.num_members else after.input_bytes
