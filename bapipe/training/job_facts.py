"""Facts that must be the same in all ranks of a job, as short texts that ranks compare before they train."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from bapipe.formats.plan import Plan
from bapipe.job.server import own_version
from bapipe.runtime.plan_digest import NUM_DIGITS, plan_digest
from bapipe.runtime.same_model import same_in_all_processes
from bapipe.training.checkpoint.folder import Checkpoint
from bapipe.training.checkpoint.weights import weights_digest
from bapipe.training.train_config import TrainConfig
from bapipe.zoo.data.dataset import PipelineDataset

_SEPARATE = {
    "factory", "data", "data_workers", "weights", "checkpoint", "resume", "replan", "without", "timeout_s",
    "tensorboard",
}  # fmt: skip
"""Options that may differ between hosts, such as folders, or that other facts cover."""


def job_facts(
    plan: Plan,
    config: TrainConfig,
    data: PipelineDataset[Any],
    samples: str | None,
    resume_from: Checkpoint | None,
) -> dict[str, str]:
    """Returns each fact's value by its name in errors; `samples` is the data's `samples_digest`.

    Raises:
        BapipeError: the weights to start from cannot be read.
    """
    starts_from = config.weights if resume_from is None else None
    return {
        "bapipe": own_version(),  # compared when ranks join, too; but earlier versions do not send theirs there
        "torch": str(torch.__version__),
        "the plan": plan_digest(plan),
        **{f"the {kind} profile": digest[:NUM_DIGITS] for kind, digest in sorted(plan.profiles.items())},
        "the data": f"{len(data)} samples" if samples is None else f"{len(data)} samples {samples}",
        "the file of `weights`": "none" if starts_from is None else weights_digest(starts_from),
        "the folder of `checkpoint`": "none" if config.checkpoint is None else "given",
        "the checkpoint to continue from": "none" if resume_from is None else _described(resume_from),
        **{
            f"`{field.name}`": _text(getattr(config, field.name))
            for field in dataclasses.fields(config)
            if field.name not in _SEPARATE
        },
    }


def _text(value: object) -> str:
    """Returns the text of an option's value, of arguments in any order."""
    return same_in_all_processes(str(dict(sorted(value.items())) if isinstance(value, Mapping) else value))


def _described(checkpoint: Checkpoint) -> str:
    """Returns name and digest: a checkpoint of another run has the same name after as many steps."""
    return f"{checkpoint.path.name} {checkpoint.manifest.digest[:NUM_DIGITS]}"
