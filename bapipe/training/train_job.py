"""The training that all ranks of a job run: what each of them gets, and what checkpoints record of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from bapipe.errors import BapipeError
from bapipe.formats.codec import fingerprint
from bapipe.formats.plan import Plan
from bapipe.runtime.optimizer import OptimizerFactory, optimizer_factory
from bapipe.torch_device import environment
from bapipe.tracing.model import persistent_state
from bapipe.training.checkpoint.folder import Checkpoint
from bapipe.training.checkpoint.manifest import Manifest, MinibatchSize, Position, check_model
from bapipe.training.checkpoint.options import kept_options
from bapipe.training.checkpoint.tensor_files import tensor_specs
from bapipe.training.train_config import TrainConfig
from bapipe.zoo.data.dataset import PipelineDataset
from bapipe.zoo.example import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """What every rank gets.

    Attributes:
        samples: the `samples_digest` of the data set, if it has one and there are checkpoints.
        validation: data to evaluate on; None without evaluation.
        learning_rate: learning rate after the warm-up.
        optimizer: class of `torch.optim`, and its arguments besides the learning rate.
        devices: names of the ranks' devices.
        resume_from: the checkpoint to continue from, verified to be whole, unless the job `verifies_together`.
        verifies_together: the ranks of the job verify what the files of a checkpoint hold, and share that.
    """

    plan: Plan
    build: Callable[[], Example]
    dataset: PipelineDataset[Any]
    samples: str | None
    validation: PipelineDataset[Any] | None
    config: TrainConfig
    learning_rate: float
    optimizer: tuple[str, Mapping[str, object]]
    devices: tuple[str, ...]
    resume_from: Checkpoint | None
    verifies_together: bool

    def manifest(self, position: Position) -> Manifest:
        """Returns the manifest of a checkpoint at a position, without its tensors and files."""
        return Manifest(
            model=self.plan.model,
            optimizer=self.optimizer[0].lower(),
            seed=self.config.seed,
            num_samples=len(self.dataset),
            minibatch_sizes=self._minibatch_sizes(),
            position=position,
            plan=fingerprint(self.plan),
            versions={name: str(value) for name, value in environment().items()},
            tensors={},
            optimizer_tensors={},
            optimizer_numbers={},
            files={},
            options=kept_options(self.config),
            samples=msgspec.UNSET if self.samples is None else self.samples,
        )

    def _minibatch_sizes(self) -> tuple[MinibatchSize, ...]:
        num_samples = self.plan.minibatch_size
        if self.resume_from is None:
            return (MinibatchSize(from_step=0, num_samples=num_samples),)
        before, start = self.resume_from.manifest.minibatch_sizes, self.resume_from.manifest.position.step
        if before[-1].num_samples == num_samples:
            return before
        return (*before, MinibatchSize(from_step=start, num_samples=num_samples))

    def optimizer_factory(self) -> OptimizerFactory:
        name, arguments = self.optimizer
        return optimizer_factory(name, self.learning_rate, arguments)


def check_resumable(job: TrainJob, checkpoint: Checkpoint, example: Example) -> None:
    """Raises BapipeError unless a job can continue from a checkpoint: with its model, optimizer, seed and data."""
    path, there, here = checkpoint.path, checkpoint.manifest, job.manifest(Position())
    stored, named = persistent_state(example.module), example.module.named_buffers(remove_duplicate=False)
    check_model(there, path, tensor_specs(stored), {name for name, _ in named} - set(stored))
    for what, old, new in (
        ("optimizer", there.optimizer, here.optimizer),
        ("seed", there.seed, here.seed),
        ("number of samples", there.num_samples, here.num_samples),
    ):
        if old != new:
            raise BapipeError(f"{path} was trained with another {what}: {old} there and {new} here")
    if msgspec.UNSET not in (there.samples, here.samples) and there.samples != here.samples:
        raise BapipeError(
            f"{path} was trained on other data with as many samples: the digest of the first and the last one is "
            f"{there.samples} there and {here.samples} here; a function for data must give the same items at each call"
        )
    if there.position.step >= job.config.steps:
        raise BapipeError(
            f"{path} is already at step {there.position.step}; with {job.config.steps} steps there is nothing left to "
            "train"
        )
