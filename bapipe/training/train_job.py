"""The training that all ranks of a job run: what each of them gets, and what checkpoints record of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from bapipe.formats.codec import fingerprint
from bapipe.formats.plan import Plan
from bapipe.runtime.optimizer import OptimizerFactory, optimizer_factory
from bapipe.torch_device import environment
from bapipe.training.checkpoint.folder import Checkpoint
from bapipe.training.checkpoint.manifest import Manifest, MinibatchSize, Position
from bapipe.training.checkpoint.options import kept_options
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
        resume_from: the checkpoint to continue from, verified to be whole.
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
