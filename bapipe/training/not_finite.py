"""Errors of a run whose loss or parameters are not finite, raised before a checkpoint; they say where that began."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bapipe.errors import RunFailed
from bapipe.job.groups import gathered
from bapipe.runtime.pipeline import Pipeline
from bapipe.training.data.loader import Batch


def loss_not_finite(pipeline: Pipeline, names: Sequence[str], batch: Batch, loss: float, step: int) -> RunFailed:
    """Returns the error for a loss that is not finite, with its cause in the data or else in parameters.

    Every rank calls it together.
    """
    everyone = gathered(_broken_data(pipeline, batch))
    if data := next((f"{words}, on rank {r} ({names[r]})" for r, words in enumerate(everyone) if words), ""):
        return RunFailed(f"the loss is {loss} at step {step}, because of the data: {data}")
    weights = _broken_parameters(pipeline, names)
    found = f"; {weights}" if weights else ""
    return RunFailed(f"the loss is {loss} at step {step}{found}: lower the learning rate or look at the data")


def check_parameters(pipeline: Pipeline, names: Sequence[str], step: int) -> None:
    """Raises RunFailed if a parameter is not finite after a step; every rank calls it together, before a checkpoint."""
    if weights := _broken_parameters(pipeline, names):
        raise RunFailed(
            f"the loss of step {step} is finite, but its update gave weights that are not; {weights}: no checkpoint is "
            "written of them, continue from the one before with a lower learning rate"
        )


def _broken_data(pipeline: Pipeline, batch: Batch) -> str:
    """Says which of the samples that this rank loaded hold values that are not finite; empty if none does."""
    parts = [*((f"input {i}", x) for i, x in enumerate(batch.inputs)), ("the target", batch.target)]
    for name, tensor in parts:
        if tensor is not None and tensor.is_floating_point():
            samples = _own_samples(pipeline, tensor)
            num_broken = sum(not bool(sample.isfinite().all()) for sample in samples)
            if num_broken:
                return f"{name} holds values that are not finite in {num_broken} of {len(samples)} samples"
    return ""


def _own_samples(pipeline: Pipeline, tensor: Tensor) -> list[Tensor]:
    """Returns the samples of this rank's micro-batches; the others are not loaded."""
    size = pipeline.microbatch_size
    return [sample for microbatch in pipeline.microbatches for sample in tensor[microbatch * size :][:size]]


def _broken_parameters(pipeline: Pipeline, names: Sequence[str]) -> str:
    """Says which ranks have parameters that are not finite; empty if none has."""
    broken = [name for name, p in pipeline.named_parameters().items() if not bool(torch.isfinite(p).all())]
    where = [f"rank {r} ({names[r]}) has {len(b)}, '{b[0]}' first" for r, b in enumerate(gathered(broken)) if b]
    return f"parameters that are not finite: {', '.join(where)}" if where else ""
