"""What must be the same in all ranks of a job, in short texts: ranks compare them before they train."""

import dataclasses
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bapipe.formats.plan import Plan
from bapipe.runtime.plan_digest import NUM_DIGITS, plan_digest
from bapipe.runtime.train_config import TrainConfig
from bapipe.zoo.data.dataset import PipelineDataset, item_parts

_SEPARATE = {
    "factory", "data", "data_workers", "weights", "checkpoint", "resume", "replan", "without", "timeout_s",
    "tensorboard",
}  # fmt: skip
"""Options that may differ between hosts, such as folders, or that show in the plan, the data or the checkpoint."""


def job_facts(plan: Plan, config: TrainConfig, data: PipelineDataset[Any], resume_from: Path | None) -> dict[str, str]:
    """Returns the value of each fact by what it is of."""
    return {
        "bapipe": version("bapipe"),
        "torch": str(torch.__version__),
        "the plan": plan_digest(plan),
        **{f"the {kind} profile": digest[:NUM_DIGITS] for kind, digest in sorted(plan.profiles.items())},
        "the data": f"{len(data)} samples{_content(data)}",
        "the checkpoint to continue from": "none" if resume_from is None else resume_from.name,
        **{
            f"`{field.name}`": str(getattr(config, field.name))
            for field in dataclasses.fields(config)
            if field.name not in _SEPARATE
        },
    }


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
    return content.hexdigest()[:NUM_DIGITS]
