"""The update at the end of a step: completes a rank's gradients, unscales and clips them, and runs its optimizers."""

from collections.abc import Mapping

from torch import Tensor

from bapipe.runtime.connected_stages import ConnectedStages
from bapipe.runtime.copy_streams import wait_on_device
from bapipe.runtime.grad_scaler import GradScalerState, unscale
from bapipe.runtime.optimizer import StageOptimizers, clip_grad_norm
from bapipe.runtime.rank_stages import RankStages
from bapipe.runtime.replicas import Replicas


def update(
    own: RankStages,
    connected: ConnectedStages,
    optimizers: StageOptimizers,
    *,
    clip_norm: float | None,
    grad_scaler: GradScalerState | None,
    kept_until: object | None,
) -> GradScalerState | None:
    """Updates a rank's stages, in the order in which their gradients became final; all ranks call it together.

    Args:
        grad_scaler: by what losses were scaled; where a gradient is not finite then, nothing is updated.
        kept_until: an event of the device before which it does not update.

    Returns:
        The loss scaling of the next step.
    """
    replicas, device, group = connected.replicas, own.layout.device, own.layout.group
    connected.tied.sum()
    wait_on_device(device, kept_until)
    # In the same order on all ranks, and all before the first wait: two stages may have the same replicas, on which
    # their gradients may become final in different orders.
    for of_stage in replicas.values():
        of_stage.gradients.start()
    finite = True
    if grad_scaler is not None:
        finite = unscale(_gradients(own, replicas), grad_scaler.scale, device, group)
        grad_scaler = grad_scaler.after_step(finite)
    if clip_norm is not None and finite:
        gradients = _gradients(own, replicas)
        counted = own.state.counted_parameters(own.layout, own.cut.trained)
        clip_grad_norm(gradients, [p.grad for p in counted if p.grad is not None], clip_norm, device, group)
    for stage in own.modules if finite else ():
        if stage in replicas:  # waits for this stage's all-reduces only: those of later stages may run
            replicas[stage].gradients.finish()
        optimizers.step(stage)
    for of_stage in replicas.values():
        of_stage.finish()
    return grad_scaler


def _gradients(own: RankStages, replicas: Mapping[int, Replicas]) -> list[Tensor]:
    """Returns this rank's gradients, after waiting for the sums over replicas."""
    for of_stage in replicas.values():
        of_stage.gradients.finish()
    return [p.grad for p in own.state.parameters() if p.grad is not None]
