"""The models of the benchmark, with inputs small enough for two cores."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bapipe.zoo import resolve
from bapipe.zoo.example import Example
from bapipe.zoo.factory import build


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model of the zoo, its mini-batch, and the micro-batch sizes to choose from."""

    model: str
    arguments: dict[str, object] = field(default_factory=dict)
    minibatch_size: int = 16
    sizes: tuple[int, ...] = (4, 8, 16)

    def build(self) -> Example:
        torch.manual_seed(0)
        return build(resolve(self.model), self.arguments)


MODELS = {
    workload.model: workload
    for workload in (
        Workload(model="vgg16", arguments={"image_size": 64}),
        Workload(model="resnet50", arguments={"image_size": 64}, minibatch_size=32, sizes=(8, 16, 32)),
        Workload(
            model="gnmt8",
            arguments={"hidden_size": 512, "vocabulary_size": 8000, "source_length": 12, "target_length": 12},
        ),
    )
}


def batch_like(example: Example, num_samples: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns random inputs and targets; sentences are all of full length."""
    torch.manual_seed(1)
    inputs = tuple(_like(tensor, num_samples) for tensor in example.tensors)
    return inputs, torch.randint(4, 100, (num_samples, *example.target.shape[1:]))


def _like(tensor: Tensor, num_samples: int) -> Tensor:
    shape = (num_samples, *tensor.shape[1:])
    if tensor.is_floating_point():
        return torch.randn(shape)
    return torch.randint(4, 100, shape) if tensor.dim() > 1 else tensor.repeat(num_samples)
