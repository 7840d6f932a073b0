"""The models that are measured on a GPU, at the sizes at which they are trained, and random batches of them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.formats.settings import Settings
from bapipe.torch_private.modules import DropoutBase
from bapipe.zoo import resolve
from bapipe.zoo.data.open_dataset import synthetic_data
from bapipe.zoo.example import Example
from bapipe.zoo.factory import build

FLOAT32 = "float32"

MODES = {
    "bfloat16": Settings(autocast="bfloat16", tf32=True),
    "tf32": Settings(tf32=True),
    FLOAT32: Settings(),
}
"""How a model computes, by name; the fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model of the zoo with its arguments, and the micro-batch sizes to measure, ascending."""

    arguments: dict[str, Any]
    sizes: tuple[int, ...]


_WORDS = {"source_length": 50, "target_length": 50}

TRAINED = {
    "resnet50": Workload(arguments={"image_size": 224}, sizes=(16, 32, 64, 128, 256)),
    "bert_large": Workload(arguments={"length": 512}, sizes=(4, 8, 16, 32)),
    "gpt2": Workload(arguments={"length": 1024}, sizes=(2, 4, 8, 16)),
    "gnmt8": Workload(arguments=_WORDS, sizes=(16, 32, 64, 128)),
    "vgg16": Workload(arguments={"image_size": 224}, sizes=(16, 32, 64, 128)),
}
"""The models as they are trained."""

_TRANSFORMER = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "length": 16, "vocabulary_size": 64}

TINY = {
    "vgg16": Workload(arguments={"image_size": 32, "width": 4, "num_classes": 10}, sizes=(2,)),
    "gpt2": Workload(arguments=_TRANSFORMER, sizes=(2,)),
    "gnmt8": Workload(
        arguments={"hidden_size": 32, "vocabulary_size": 64, "source_length": 6, "target_length": 6}, sizes=(2,)
    ),
}
"""Models for which only the result matters: images, attention, recurrence."""


@lru_cache(maxsize=1)  # several sizes of a model are measured one after another
def example_of(name: str, is_tiny: bool) -> Example:
    """Returns a model with its example inputs; it stays on the CPU, and training it is up to a copy."""
    return build(resolve(name), (TINY if is_tiny else TRAINED)[name].arguments)


def random_batch(name: str, example: Example, size: int) -> tuple[Tensor, ...]:
    """Returns inputs and target of so many samples of the model's synthetic data, on the CPU."""
    data = synthetic_data(example, name)
    assert data is not None  # the models of the zoo have some
    return tuple(
        torch.stack([torch.as_tensor(data.part(index, place)) for index in range(size)])
        for place in range(len(example.tensors) + 1)
    )


def without_dropout(module: nn.Module) -> nn.Module:
    """Returns the module itself, which no longer draws random numbers: they would depend on the cut."""
    for part in module.modules():
        if isinstance(part, DropoutBase):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0  # type: ignore[assignment]
    return module
