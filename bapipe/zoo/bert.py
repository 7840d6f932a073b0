"""BERT (Devlin et al. 2018, arXiv:1810.04805) with its masked-language-modelling loss."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.zoo.data.language_modeling import IGNORED, masked_texts
from bapipe.zoo.example import Example
from bapipe.zoo.position_ids import position_ids
from bapipe.zoo.transformer import PostNormBlock, check_texts

_DROPOUT = 0.1


class BERT(nn.Module):
    """Maps tokens [n, length], their segments (0 or 1) and a mask of words to scores [n, length, vocabulary_size].

    It has the head that predicts masked words, but not the next-sentence head and the pooling layer that only that one
    uses. The output weights are those of the embedding.
    """

    def __init__(
        self, num_layers: int, hidden_size: int, num_heads: int, vocabulary_size: int, num_positions: int
    ) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary_size, hidden_size)
        self.position_embedding = nn.Embedding(num_positions, hidden_size)
        self.segment_embedding = nn.Embedding(2, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(_DROPOUT)
        self.blocks = nn.ModuleList(PostNormBlock(hidden_size, num_heads, _DROPOUT) for _ in range(num_layers))
        self.transform = nn.Linear(hidden_size, hidden_size)
        self.gelu = nn.GELU()
        self.transform_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.head = nn.Linear(hidden_size, vocabulary_size)
        self.head.weight = self.word_embedding.weight

    def forward(self, tokens: Tensor, segments: Tensor, is_word: Tensor) -> Tensor:
        words = self.word_embedding(tokens)
        embedded = words + self.position_embedding(position_ids(tokens)) + self.segment_embedding(segments)
        x = self.dropout(self.norm(embedded))
        for block in self.blocks:
            x = block(x, is_word)
        scores: Tensor = self.head(self.transform_norm(self.gelu(self.transform(x))))
        return scores


def bert_base(
    num_layers: int = 12,
    hidden_size: int = 768,
    num_heads: int = 12,
    vocabulary_size: int = 30_522,
    num_positions: int = 512,
    length: int = 128,
) -> Example:
    """Returns BERT-base on texts padded to a given length, with 15 % of their words to predict.

    Raises:
        ValueError: `num_heads` does not divide the hidden size, texts are longer than the number of positions, or the
            vocabulary has no words.
    """
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "vocabulary_size": vocabulary_size}
    check_texts(length, num_positions, num_layers=num_layers, **sizes)
    if vocabulary_size < 3:
        raise ValueError(f"vocabulary_size is {vocabulary_size}; 2 words are marks, so want at least 3")
    return Example(
        module=BERT(num_layers, hidden_size, num_heads, vocabulary_size, num_positions).apply(initialize),
        inputs=(
            torch.zeros(1, length, dtype=torch.int64),
            torch.zeros(1, length, dtype=torch.int64),
            torch.ones(1, length, dtype=torch.bool),
        ),
        target=torch.zeros(1, length, dtype=torch.int64),
        loss=restored_loss,
        data=partial(masked_texts, vocabulary_size=vocabulary_size, length=length),
        initialize=initialize,
        learning_rate=0.02,
    )


def bert_large(
    num_layers: int = 24,
    hidden_size: int = 1024,
    num_heads: int = 16,
    vocabulary_size: int = 30_522,
    num_positions: int = 512,
    length: int = 128,
) -> Example:
    """Returns BERT-large; see `bert_base`."""
    return bert_base(num_layers, hidden_size, num_heads, vocabulary_size, num_positions, length)


def restored_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Returns the cross entropy of the masked words: the mean over the texts of each text's mean.

    If each text has the same number of masked words, it is the mean over all of them, as in the paper. Otherwise a mean
    over all words would depend on which texts share a micro-batch.
    """
    # In rows: with the words as second dimension, a GPU takes several times as long.
    rows = functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none")
    costs = rows.view_as(target)
    return (costs.sum(1) / (target != IGNORED).sum(1).clamp(min=1)).mean()


def initialize(layer: nn.Module) -> None:
    """Sets the parameters of one layer as Google's code does: normal(0.02) cut off at two deviations, biases 0."""
    if isinstance(layer, nn.Embedding | nn.Linear):
        nn.init.trunc_normal_(layer.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(layer, nn.Linear):
        nn.init.zeros_(layer.bias)
