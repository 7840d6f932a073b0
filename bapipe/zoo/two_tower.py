"""A model with two branches that join late: one for an image, one for a question about it; the output is the answer."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.zoo.checks import check_sizes
from bapipe.zoo.data.vqa import PAD, num_words, visual_questions
from bapipe.zoo.example import Example
from bapipe.zoo.metrics import top_1
from bapipe.zoo.position_ids import position_ids
from bapipe.zoo.transformer import PreNormBlock, check_heads

_DROPOUT = 0.1


class ImageTower(nn.Module):
    """Maps images [n, 3, height, width] to [n, hidden_size], as a Vision Transformer (arXiv:2010.11929) of patches."""

    def __init__(self, num_layers: int, hidden_size: int, num_heads: int, patch_size: int, num_patches: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden_size, kernel_size=patch_size, stride=patch_size)
        self.positions = nn.Embedding(num_patches, hidden_size)
        self.dropout = nn.Dropout(_DROPOUT)
        self.blocks = nn.ModuleList(PreNormBlock(hidden_size, num_heads, _DROPOUT) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = self.dropout(x + self.positions(position_ids(x[:, :, 0])))
        for block in self.blocks:
            x = block(x)
        seen: Tensor = self.norm(x).mean(1)
        return seen


class TextTower(nn.Module):
    """Maps words [n, length], 0 for padding, to [n, hidden_size]."""

    def __init__(self, num_layers: int, hidden_size: int, num_heads: int, vocabulary_size: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary_size, hidden_size, padding_idx=PAD)
        self.positions = nn.Embedding(length, hidden_size)
        self.dropout = nn.Dropout(_DROPOUT)
        self.blocks = nn.ModuleList(PreNormBlock(hidden_size, num_heads, _DROPOUT) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, question: Tensor) -> Tensor:
        is_word = question != PAD
        x = self.dropout(self.words(question) + self.positions(position_ids(question)))
        for block in self.blocks:
            x = block(x, is_word)
        read = torch.where(is_word.unsqueeze(2), self.norm(x), 0.0)
        return read.sum(1) / is_word.sum(1, keepdim=True)


class TwoTower(nn.Module):
    """Maps images and questions to scores of answers [n, num_answers]; the towers do not depend on each other."""

    def __init__(self, image: ImageTower, text: TextTower, hidden_size: int, num_answers: int) -> None:
        super().__init__()
        self.image = image
        self.text = text
        self.joint = nn.Linear(2 * hidden_size, hidden_size)
        self.gelu = nn.GELU(approximate="tanh")
        self.answers = nn.Linear(hidden_size, num_answers)

    def forward(self, image: Tensor, question: Tensor) -> Tensor:
        both = torch.cat((self.image(image), self.text(question)), dim=1)
        scores: Tensor = self.answers(self.gelu(self.joint(both)))
        return scores


def two_tower(
    num_layers: int = 6,
    hidden_size: int = 384,
    num_heads: int = 6,
    image_size: int = 64,
    patch_size: int = 8,
    length: int = 16,
    num_answers: int = 10,
) -> Example:
    """Returns a model of two towers of `num_layers` transformer blocks each, which learns to answer questions.

    The loss is the cross entropy of the answers. A contrastive loss over images and the texts of other samples would
    depend on which samples share a micro-batch, and so differ from that of the mini-batch.

    Raises:
        ValueError: `num_heads` does not divide the hidden size, patches do not divide the image, or questions do not
            fit in the length.
    """
    check_sizes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        image_size=image_size,
        patch_size=patch_size,
        length=length,
        num_answers=num_answers,
    )
    check_heads(hidden_size, num_heads)
    if image_size % patch_size:
        raise ValueError(f"image_size {image_size} does not divide into patches of {patch_size}; want a multiple of it")
    if length < 2:
        raise ValueError(f"length is {length}; a question has two words or more, so want at least 2")
    num_patches = (image_size // patch_size) ** 2
    image = ImageTower(num_layers, hidden_size, num_heads, patch_size, num_patches)
    text = TextTower(num_layers, hidden_size, num_heads, num_words(num_answers), length)
    return Example(
        module=TwoTower(image, text, hidden_size, num_answers).apply(initialize),
        inputs=(torch.randn(1, 3, image_size, image_size), torch.ones(1, length, dtype=torch.int64)),
        target=torch.zeros(1, dtype=torch.int64),
        loss=functional.cross_entropy,
        data=partial(visual_questions, image_size=image_size, length=length, num_answers=num_answers),
        initialize=initialize,
        metrics={"top-1": top_1},
        learning_rate=0.02,
    )


def initialize(layer: nn.Module) -> None:
    """Sets the parameters of one layer: normal, of deviation 0.02, or of variance 1 / inputs for patches; biases 0."""
    if isinstance(layer, nn.Embedding | nn.Linear):
        nn.init.normal_(layer.weight, std=0.02)
    elif isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="linear")
    if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
