"""Arguments that make every model of the zoo small enough to train in a test."""

from typing import Any

import torch
from torch import nn

from bapipe.equivalence.outcome import Microbatch
from bapipe.zoo import ZOO
from bapipe.zoo.example import Example
from bapipe.zoo.factory import build

_WORDS = {"hidden_size": 16, "vocabulary_size": 40, "source_length": 7, "target_length": 6}

_TRANSFORMER = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "vocabulary_size": 40,
    "num_positions": 12,
    "length": 10,
}

SMALL: dict[str, dict[str, Any]] = {
    "bert_base": _TRANSFORMER,
    "bert_large": _TRANSFORMER,
    "cosmoflow": {"volume_size": 16, "width": 2},
    "gnmt": {"num_pairs": 2, **_WORDS},
    "gnmt16": _WORDS,
    "gnmt8": _WORDS,
    "gpt2": _TRANSFORMER,
    "resnet50": {"image_size": 40, "num_classes": 10, "width": 4},
    "two_tower": {
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "length": 6,
        "num_answers": 4,
    },
    "unet": {"image_size": 32, "width": 4},
    "unet3d": {"volume_size": 16, "width": 2},
    "vgg16": {"image_size": 32, "num_classes": 10, "width": 4},
    "vgg16_bn": {"image_size": 32, "num_classes": 10, "width": 4},
}


def small(name: str) -> Example:
    return build(ZOO[name], SMALL[name])


QUICK = sorted(set(SMALL) - {"bert_large", "gnmt8", "gnmt16"})
"""Of each kind of model the smaller one."""


def with_four_samples(name: str) -> tuple[Example, Microbatch]:
    """An example with a micro-batch of its samples."""
    torch.manual_seed(0)
    example = small(name)
    rows = torch.arange(4) % len(example.target)
    return example, Microbatch(inputs=tuple(x[rows] for x in example.tensors), target=example.target[rows])


def build_on_meta(factory: str, arguments: dict[str, Any]) -> Example:
    """What a factory makes, with every tensor on the meta device."""
    with torch.device("meta"):
        return build(factory, arguments)


def without_dropout(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0  # type: ignore[assignment]
    return module
