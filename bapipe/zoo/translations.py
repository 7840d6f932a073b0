"""Pairs of sentences to train translation on: made-up ones, those of a folder, or what this machine's programs say."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from bapipe.errors import BapipeError
from bapipe.zoo.catalogues import ROOT, catalogue_pairs

PAD, UNKNOWN, BEGIN, END = range(4)
"""The words that every vocabulary begins with."""

NUM_SYNTHETIC = 10_000
"""Length of the `synthetic` data set."""

_LOCALE = "locale:"

Sentences = list[list[str]]
Pair = tuple[tuple[Tensor, Tensor, Tensor], Tensor]
"""((source [source_length], number of its words, target after BEGIN [target_length]), target before END)"""


def translations(spec: str, *, vocabulary_size: int, source_length: int, target_length: int) -> Dataset[Pair]:
    """Returns pairs of sentences as int64 words, padded to the lengths given.

    `spec` is `synthetic`; a folder with `source.txt` and `target.txt`, line by line a sentence and its translation,
    words between spaces; or `locale:de`, the messages of this machine's programs in English and in German, or in any
    other language. Words are numbered as in the folder's `vocabulary.txt`, one a line, or else by how often they occur;
    words beyond the vocabulary are one and the same. Pairs that are empty or too long are left out. A vocabulary has 5
    words or more, and a target 2.

    Raises:
        BapipeError: no such data.
    """
    lengths = {"source_length": source_length, "target_length": target_length}
    if spec == "synthetic":
        return _Synthetic(vocabulary_size=vocabulary_size, **lengths)
    sources, targets = _catalogues(spec) if spec.startswith(_LOCALE) else _folder(Path(spec))
    known = _vocabulary(Path(spec, "vocabulary.txt"), (*sources, *targets), vocabulary_size - END - 1)
    number = {word: END + 1 + place for place, word in enumerate(known)}
    pairs = tuple(
        (tuple(number.get(word, UNKNOWN) for word in source), tuple(number.get(word, UNKNOWN) for word in target))
        for source, target in zip(sources, targets, strict=True)
        if 0 < len(source) <= source_length and 0 < len(target) < target_length
    )
    if not pairs:
        raise BapipeError(
            f"data '{spec}' has no pair of up to {source_length} and {target_length - 1} words: build the model with "
            "a larger source_length and target_length"
        )
    return _Sentences(pairs=pairs, **lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Synthetic(Dataset[Pair]):
    """A word's translation is the word after it, the last one's the first; word k is as frequent as in Zipf's law.

    Item i depends on i alone.
    """

    vocabulary_size: int
    source_length: int
    target_length: int

    def __len__(self) -> int:
        return NUM_SYNTHETIC

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < NUM_SYNTHETIC:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        num_words, longest = self.vocabulary_size - END - 1, min(self.source_length, self.target_length - 1)
        length = int(torch.randint((longest + 1) // 2, longest + 1, (), generator=generator))
        rank = (num_words + 1) ** torch.rand(length, generator=generator, dtype=torch.float64)
        words = rank.long().clamp(max=num_words) - 1
        first = END + 1
        return _pair(first + words, first + (words + 1) % num_words, self.source_length, self.target_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sentences(Dataset[Pair]):
    """Pairs held as lists of words."""

    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    source_length: int
    target_length: int

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        source, target = self.pairs[index]
        return _pair(torch.tensor(source), torch.tensor(target), self.source_length, self.target_length)


def _pair(source: Tensor, target: Tensor, source_length: int, target_length: int) -> Pair:
    begin, end = torch.tensor([BEGIN]), torch.tensor([END])
    inputs = (
        _padded(source, source_length),
        torch.tensor(len(source)),
        _padded(torch.cat((begin, target)), target_length),
    )
    return inputs, _padded(torch.cat((target, end)), target_length)


def _padded(words: Tensor, length: int) -> Tensor:
    return functional.pad(words, (0, length - len(words)), value=PAD)


def _catalogues(spec: str) -> tuple[Sentences, Sentences]:
    language = spec.removeprefix(_LOCALE)
    pairs = list(catalogue_pairs(language)) if language.replace("_", "").isalpha() else []
    if not pairs:
        raise BapipeError(
            f"data '{spec}': this machine's programs have no messages in language '{language}' under {ROOT}: want the "
            "name of a folder there, such as de, or a folder with source.txt and target.txt"
        )
    return [source for source, _ in pairs], [target for _, target in pairs]


def _folder(root: Path) -> tuple[Sentences, Sentences]:
    if not root.is_dir():
        raise BapipeError(
            f"data '{root}' is not a folder: want synthetic, locale:de, or a folder with source.txt and target.txt"
        )
    sources, targets = (_sentences(root / name) for name in ("source.txt", "target.txt"))
    if len(sources) != len(targets):
        raise BapipeError(
            f"data '{root}' has {len(sources)} lines in source.txt and {len(targets)} in target.txt: want a "
            "translation a line"
        )
    return sources, targets


def _sentences(path: Path) -> Sentences:
    try:
        return [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BapipeError(f"{path}: cannot be read: {error}; want UTF-8 text, a sentence a line") from None


def _vocabulary(path: Path, sentences: Sequence[Sequence[str]], num_words: int) -> list[str]:
    if path.exists():
        return [word for line in _sentences(path) for word in line[:1]][:num_words]
    counts = Counter(word for sentence in sentences for word in sentence)
    return sorted(counts, key=lambda word: (-counts[word], word))[:num_words]
