"""GPT-2 (Radford et al. 2019): a transformer that continues text; its output weights are those of its embedding."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.zoo.data.language_modeling import next_token_texts
from bapipe.zoo.example import Example
from bapipe.zoo.position_ids import position_ids
from bapipe.zoo.transformer import PreNormBlock, check_texts

_DROPOUT = 0.1


class GPT2(nn.Module):
    """Maps tokens [n, length] to scores of the token after each [n, length, vocabulary_size]."""

    def __init__(
        self, num_layers: int, hidden_size: int, num_heads: int, vocabulary_size: int, num_positions: int
    ) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary_size, hidden_size)
        self.position_embedding = nn.Embedding(num_positions, hidden_size)
        self.dropout = nn.Dropout(_DROPOUT)
        self.blocks = nn.ModuleList(
            PreNormBlock(hidden_size, num_heads, _DROPOUT, causal=True) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocabulary_size, bias=False)
        self.head.weight = self.word_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.word_embedding(tokens) + self.position_embedding(position_ids(tokens)))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def gpt2(
    num_layers: int = 12,
    hidden_size: int = 768,
    num_heads: int = 12,
    vocabulary_size: int = 50_257,
    num_positions: int = 1024,
    length: int = 128,
) -> Example:
    """Returns GPT-2, the small one by default, on texts of a given length.

    Raises:
        ValueError: `num_heads` does not divide the hidden size, or texts are longer than the number of positions.
    """
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "vocabulary_size": vocabulary_size}
    check_texts(length, num_positions, num_layers=num_layers, **sizes)
    start = partial(initialize, hidden_size=hidden_size, num_branches=2 * num_layers)
    module = GPT2(num_layers, hidden_size, num_heads, vocabulary_size, num_positions)
    return Example(
        module=module.apply(start),
        inputs=(torch.zeros(1, length, dtype=torch.int64),),
        target=torch.zeros(1, length, dtype=torch.int64),
        loss=next_word_loss,
        data=partial(next_token_texts, vocabulary_size=vocabulary_size, length=length),
        initialize=start,
        learning_rate=0.02,
    )


def next_word_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Returns the mean cross entropy over all words; all texts have the same length."""
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def initialize(layer: nn.Module, *, hidden_size: int, num_branches: int) -> None:
    """Sets the parameters of one layer: normal(0.02), and less in the last layer of a residual branch (section 2.3).

    Those are the layers with a bias and `hidden_size` output features. They are divided by the root of the number of
    branches, so that their sum does not grow with it.
    """
    if isinstance(layer, nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    elif isinstance(layer, nn.Linear):
        ends = layer.bias is not None and layer.out_features == hidden_size
        nn.init.normal_(layer.weight, std=0.02 * num_branches**-0.5 if ends else 0.02)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
