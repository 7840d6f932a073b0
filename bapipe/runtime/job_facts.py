"""What must be the same in all ranks of a job, in short texts: ranks compare them before they train."""

import dataclasses
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from bapipe.formats.plan import Plan
from bapipe.runtime.train_config import TrainConfig
from bapipe.zoo.data.dataset import PipelineDataset, item_parts

_SEPARATE = {
    "factory", "data", "data_workers", "weights", "checkpoint", "resume", "replan", "without", "timeout_s",
    "tensorboard",
}  # fmt: skip
"""Options that may differ between hosts, such as folders, or that show in the plan, the data or the checkpoint."""

_DIGITS = 12


def job_facts(plan: Plan, config: TrainConfig, data: PipelineDataset[Any], resume_from: Path | None) -> dict[str, str]:
    """Returns the value of each fact by what it is of."""
    return {
        "bapipe": version("bapipe"),
        "torch": str(torch.__version__),
        "the plan": _digest(msgspec.json.encode(_what_runs(plan), order="sorted")),
        **{f"the {kind} profile": digest[:_DIGITS] for kind, digest in sorted(plan.profiles.items())},
        "the data": f"{len(data)} samples{_content(data)}",
        "the checkpoint to continue from": "none" if resume_from is None else resume_from.name,
        **{
            f"`{field.name}`": str(getattr(config, field.name))
            for field in dataclasses.fields(config)
            if field.name not in _SEPARATE
        },
    }


def _what_runs(plan: Plan) -> list[object]:
    """Returns the parts of a plan that ranks follow; how long a search took, for one, may differ."""
    return [
        plan.model, plan.factory, plan.arguments, plan.stages, plan.order, plan.minibatch_size, plan.microbatch_size,
        [device.name for device in plan.cluster.devices],
    ]  # fmt: skip


def _content(data: PipelineDataset[Any]) -> str:
    """Returns a digest of the first and the last sample; empty if they are drawn anew each time, or are no tensors."""
    try:
        first, second = (_samples_digest(data, seed) for seed in (0, 1))
    except (TypeError, ValueError, RuntimeError):
        return ""
    return f" {first}" if first == second else ""


def _samples_digest(data: PipelineDataset[Any], seed: int) -> str:
    content = hashlib.sha256()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for index in (0, len(data) - 1):
            for part in item_parts(data[index]):
                tensor = torch.as_tensor(part)
                content.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:_DIGITS]


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:_DIGITS]
