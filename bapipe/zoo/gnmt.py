"""GNMT (Wu et al. 2016, arXiv:1609.08144) in NVIDIA's version 2, the translation model of PipeDream and BaPipe.

Several LSTMs encode a sentence, and the same number of LSTMs decode its translation. Attention is computed once, from
the output of the first decoder layer, and is an input of all later ones.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.zoo.checks import check_sizes
from bapipe.zoo.data.translation import BEGIN, END, PAD, translations
from bapipe.zoo.example import Example, GenerationConfig
from bapipe.zoo.metrics import bleu
from bapipe.zoo.position_ids import position_ids

_UNIFORM = 0.1
"""Weights are initialized uniformly in ±0.1."""

_DROPOUT = 0.2
_SMOOTHING = 0.1


class Recurrent(nn.Module):
    """An LSTM over [n, length, input_size], with dropout on its input."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(_DROPOUT)
        self.lstm = nn.LSTM(input_size, hidden_size, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.lstm(self.dropout(x))[0]
        return hidden


class Bidirectional(nn.Module):
    """Two LSTMs over [n, length, hidden_size], one of which reads each sentence from its last word to its first.

    At the positions of words the result equals that of one bidirectional LSTM for packed sequences. Packing would need
    the lengths as Python numbers, and such a model could not be traced.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(_DROPOUT)
        self.ahead = nn.LSTM(hidden_size, hidden_size, batch_first=True)
        self.back = nn.LSTM(hidden_size, hidden_size, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.dropout(x)
        ahead = self.ahead(x)[0]
        back = _reverse(self.back(_reverse(x, lengths))[0], lengths)
        return torch.cat((ahead, back), dim=2)


class Attention(nn.Module):
    """Bahdanau attention in the normalised form (Bahdanau et al. 2015; Salimans, Kingma 2016).

    The score of a word is the product of tanh(query + key + bias) with a vector of learned direction and length.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.direction = nn.Parameter(torch.empty(hidden_size))
        self.scale = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.direction, -_UNIFORM, _UNIFORM)
        nn.init.constant_(self.scale, len(self.direction) ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(self, queries: Tensor, context: Tensor, lengths: Tensor) -> Tensor:
        """Returns the mean of `context` [n, source, hidden] over each sentence's words, weighted for each query."""
        energy = torch.tanh(self.query(queries).unsqueeze(2) + self.key(context).unsqueeze(1) + self.bias)
        scores = energy @ (self.direction / self.direction.norm() * self.scale)
        padding = position_ids(context[:, :, 0]) >= lengths.unsqueeze(1)
        weights = torch.softmax(scores.masked_fill(padding.unsqueeze(1), float("-inf")), dim=2)
        return weights @ context


class Encoder(nn.Module):
    """Maps words [n, source] and numbers of words [n] to [n, source, hidden]; residuals from the third LSTM on."""

    def __init__(self, num_layers: int, hidden_size: int, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, hidden_size, padding_idx=PAD)
        self.first = Bidirectional(hidden_size)
        self.second = Recurrent(2 * hidden_size, hidden_size)
        self.later = nn.ModuleList(Recurrent(hidden_size, hidden_size) for _ in range(num_layers - 2))

    def forward(self, source: Tensor, lengths: Tensor) -> Tensor:
        x: Tensor = self.second(self.first(self.embedding(source), lengths))
        for layer in self.later:
            x = x + layer(x)
        return x


class Decoder(nn.Module):
    """Maps the words so far [n, target] to scores of the next [n, target, vocabulary]."""

    def __init__(self, num_layers: int, hidden_size: int, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, hidden_size, padding_idx=PAD)
        self.first = Recurrent(hidden_size, hidden_size)
        self.attention = Attention(hidden_size)
        self.second = Recurrent(2 * hidden_size, hidden_size)
        self.later = nn.ModuleList(Recurrent(2 * hidden_size, hidden_size) for _ in range(num_layers - 2))
        self.classifier = nn.Linear(hidden_size, vocabulary_size)

    def forward(self, target: Tensor, context: Tensor, lengths: Tensor) -> Tensor:
        x = self.first(self.embedding(target))
        attended = self.attention(x, context, lengths)
        x = self.second(torch.cat((x, attended), dim=2))
        for layer in self.later:
            x = x + layer(torch.cat((x, attended), dim=2))
        scores: Tensor = self.classifier(x)
        return scores


class GNMT(nn.Module):
    """Maps sentences and their translations so far to scores of the next words [n, target, vocabulary].

    Word 0 pads. `source_lengths` are the numbers of words in `source`, at least 1 each.
    """

    def __init__(self, num_pairs: int, hidden_size: int, vocabulary_size: int) -> None:
        super().__init__()
        self.encoder = Encoder(num_pairs, hidden_size, vocabulary_size)
        self.decoder = Decoder(num_pairs, hidden_size, vocabulary_size)

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        scores: Tensor = self.decoder(target, self.encoder(source, source_lengths), source_lengths)
        return scores


def gnmt(
    num_pairs: int = 4,
    hidden_size: int = 1024,
    vocabulary_size: int = 32_320,
    source_length: int = 25,
    target_length: int = 25,
) -> Example:
    """Returns GNMT with `num_pairs` LSTMs in the encoder and in the decoder each, on sentences padded to given lengths.

    Raises:
        ValueError: fewer than 2 pairs, a vocabulary without words, or a target too short for a word and its end.
    """
    check_sizes(
        num_pairs=num_pairs,
        hidden_size=hidden_size,
        vocabulary_size=vocabulary_size,
        source_length=source_length,
        target_length=target_length,
    )
    if num_pairs < 2:
        raise ValueError(f"num_pairs is {num_pairs}; the first two layers of each side are special, so want at least 2")
    if vocabulary_size < 5:
        raise ValueError(f"vocabulary_size is {vocabulary_size}; 4 words are marks, so want at least 5")
    if target_length < 2:
        raise ValueError(f"target_length is {target_length}; every target ends with a mark, so want at least 2")
    opened = partial(
        translations, vocabulary_size=vocabulary_size, source_length=source_length, target_length=target_length
    )
    return Example(
        module=GNMT(num_pairs, hidden_size, vocabulary_size).apply(initialize),
        inputs=(
            torch.ones(1, source_length, dtype=torch.int64),
            torch.full((1,), source_length),
            torch.ones(1, target_length, dtype=torch.int64),
        ),
        target=torch.ones(1, target_length, dtype=torch.int64),
        loss=smoothed_loss,
        data=opened,
        initialize=initialize,
        learning_rate=0.01,
        generation=GenerationConfig(input_index=2, bos=BEGIN, eos=END, pad=PAD, scores={"BLEU": bleu}),
    )


def gnmt8(
    hidden_size: int = 1024, vocabulary_size: int = 32_320, source_length: int = 25, target_length: int = 25
) -> Example:
    """Returns GNMT-8, of 4 pairs; see `gnmt`."""
    return gnmt(4, hidden_size, vocabulary_size, source_length, target_length)


def gnmt16(
    hidden_size: int = 1024, vocabulary_size: int = 32_320, source_length: int = 25, target_length: int = 25
) -> Example:
    """Returns GNMT-16, of 8 pairs; see `gnmt`."""
    return gnmt(8, hidden_size, vocabulary_size, source_length, target_length)


def smoothed_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Returns the cross entropy per sentence, with labels smoothed by 0.1; padding does not count.

    It is summed over words and divided by the number of sentences, not of words: micro-batches have equal numbers of
    sentences but not of words, so only then the mean of their losses, and gradients, is that of the mini-batch.
    NVIDIA's training divides by the same number.
    """
    summed = functional.cross_entropy(
        scores.flatten(0, 1), target.flatten(), ignore_index=PAD, label_smoothing=_SMOOTHING, reduction="sum"
    )
    return summed / target.shape[0]


def initialize(layer: nn.Module) -> None:
    """Sets the parameters of one layer as NVIDIA's GNMT does: uniform in ±0.1, an LSTM's second bias 0."""
    if isinstance(layer, nn.LSTM | nn.Embedding | nn.Linear):
        for name, parameter in layer.named_parameters():
            if name.startswith("bias_hh"):
                nn.init.zeros_(parameter)
            else:
                nn.init.uniform_(parameter, -_UNIFORM, _UNIFORM)


def _reverse(x: Tensor, lengths: Tensor) -> Tensor:
    """Returns the sequences [n, length, size] with the words of each reversed; padding stays at the end."""
    place, last = position_ids(x[:, :, 0]), lengths.unsqueeze(1) - 1
    order = torch.where(place > last, place, last - place)
    return x.gather(1, order.unsqueeze(2).expand_as(x))
