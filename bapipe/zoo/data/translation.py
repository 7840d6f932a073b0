"""Pairs of sentences to train translation on: synthetic ones, those of a folder, or messages of installed programs."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from bapipe.errors import BapipeError
from bapipe.zoo.data.dataset import NUM_SYNTHETIC, PipelineDataset
from bapipe.zoo.data.file_check import check_can_be_read_whole
from bapipe.zoo.data.gettext_corpus import ROOT, catalogue_pairs
from bapipe.zoo.data.subwords import trained

PAD, UNKNOWN, BEGIN, END = range(4)
"""The first words of every vocabulary: marks."""

LOCALE = "locale:"
"""Prefix of the name of a language's messages."""

_log = logging.getLogger(__name__)

Texts = list[tuple[str, str]]
"""Sentences and their translations."""

Pair = tuple[tuple[Tensor, Tensor, Tensor], Tensor]
"""((source [source_length], number of its words, target after BEGIN [target_length]), target before END)"""


def translations(spec: str, *, vocabulary_size: int, source_length: int, target_length: int) -> "Translations":
    """Returns pairs of sentences as int64 words, padded to the lengths given.

    `spec` is `synthetic`; a folder with `source.txt` and `target.txt`, line by line a sentence and its translation; or
    `locale:de`, the messages of this machine's programs in English and in German, or in any other language. In a
    folder with a `train` and a `val` folder of this kind, the pairs in `val` are its `held_out`.

    If the folder has a `vocabulary.txt`, one word per line, words are separated by spaces, and all unknown words share
    one number. Otherwise they are subwords trained on both languages together, see `bapipe.zoo.data.subwords`. Pairs
    that are empty or too long are left out. A vocabulary has 5 words or more, and a target 2.

    Raises:
        BapipeError: no such data.
    """
    if spec == "synthetic":
        return _Synthetic(vocabulary_size=vocabulary_size, source_length=source_length, target_length=target_length)
    training, others, listed = _texts(spec)
    vocabulary = _listed(listed, vocabulary_size) if listed else _subwords(training, vocabulary_size)
    fitting = partial(_fitting, vocabulary=vocabulary, source_length=source_length, target_length=target_length)
    return fitting(spec, training, held_out=fitting(f"{spec}/val", others) if others else None)


class Translations(PipelineDataset[Pair]):
    """Pairs of sentences; `held_out` has other pairs to evaluate on."""

    __slots__ = ()

    @property
    def held_out(self) -> "Translations | None":
        return None

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Pair:
        raise NotImplementedError

    def lengths(self, index: int) -> tuple[int, int]:
        """Returns the numbers of words of a pair, including the end mark of the second."""
        (_, source, _), after = self[index]
        return int(source), int((after != PAD).sum())


class Vocabulary(Protocol):
    """Converts sentences to numbers of words and back."""

    def encode(self, text: str) -> tuple[int, ...]: ...
    def decode(self, words: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """Words separated by spaces, numbered in the order of the list."""

    words: tuple[str, ...]
    number: Mapping[str, int]

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.number.get(word, UNKNOWN) for word in text.split())

    def decode(self, words: Sequence[int]) -> str:
        last = END + len(self.words)
        return " ".join(self.words[word - END - 1] if END < word <= last else "?" for word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Synthetic(Translations):
    """The translation of a word is the next one in the vocabulary, cyclically; words are distributed by Zipf's law.

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

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, _until_end(tokens)))

    def reference(self, index: int) -> str:
        return self.text(self[index][1].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sentences(Translations):
    """Pairs as numbers of words, and the translations also as text."""

    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    references: tuple[str, ...]
    vocabulary: Vocabulary
    source_length: int
    target_length: int
    others: "_Sentences | None" = None

    @property
    def held_out(self) -> Translations | None:
        return self.others

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        source, target = self.pairs[index]
        return _pair(torch.tensor(source), torch.tensor(target), self.source_length, self.target_length)

    def lengths(self, index: int) -> tuple[int, int]:
        source, target = self.pairs[index]
        return len(source), len(target) + 1

    def text(self, tokens: Sequence[int]) -> str:
        return self.vocabulary.decode(_until_end(tokens))

    def reference(self, index: int) -> str:
        return self.references[index]


def _until_end(words: Sequence[int]) -> Sequence[int]:
    """Returns the words before the first end mark or padding."""
    return words[: next((place for place, word in enumerate(words) if word in (END, PAD)), len(words))]


def _fitting(
    name: str,
    texts: Texts,
    *,
    vocabulary: Vocabulary,
    source_length: int,
    target_length: int,
    held_out: _Sentences | None = None,
) -> _Sentences:
    words = [(vocabulary.encode(source), vocabulary.encode(target)) for source, target in texts]
    fit = [i for i, (a, b) in enumerate(words) if 0 < len(a) <= source_length and 0 < len(b) < target_length]
    if not fit:
        raise BapipeError(
            f"data '{name}' has no pair of up to {source_length} and {target_length - 1} words: build the model with "
            "a larger source_length and target_length"
        )
    if len(fit) < len(words):
        _log.info(
            f"data '{name}': {len(words) - len(fit):,} of {len(words):,} pairs are left out, empty or longer than "
            f"{source_length} and {target_length - 1} words"
        )
    return _Sentences(
        pairs=tuple(words[i] for i in fit),
        references=tuple(texts[i][1] for i in fit),
        vocabulary=vocabulary,
        source_length=source_length,
        target_length=target_length,
        others=held_out,
    )


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


def _texts(spec: str) -> tuple[Texts, Texts, Path | None]:
    """Returns the sentences to train on, those to evaluate on, and the path of the vocabulary if there is one."""
    if spec.startswith(LOCALE):
        return _catalogues(spec), [], None
    root = Path(spec)
    apart = (root / "train").is_dir()
    training = root / "train" if apart else root
    listed = next((path for folder in (root, training) if (path := folder / "vocabulary.txt").exists()), None)
    return _folder(training), _folder(root / "val") if apart and (root / "val").is_dir() else [], listed


def _catalogues(spec: str) -> Texts:
    language = spec.removeprefix(LOCALE)
    pairs = list(catalogue_pairs(language)) if language.replace("_", "").isalpha() else []
    if not pairs:
        raise BapipeError(
            f"data '{spec}': this machine's programs have no messages in language '{language}' under {ROOT}: want the "
            "name of a folder there, such as de, or a folder with source.txt and target.txt"
        )
    return pairs


def _folder(root: Path) -> Texts:
    if not root.is_dir():
        raise BapipeError(
            f"data '{root}' is not a folder: want synthetic, locale:de, or a folder with source.txt and target.txt"
        )
    sources, targets = (_lines(root / name) for name in ("source.txt", "target.txt"))
    if len(sources) != len(targets):
        raise BapipeError(
            f"data '{root}' has {len(sources)} lines in source.txt and {len(targets)} in target.txt: want a "
            "translation per line"
        )
    return list(zip(sources, targets, strict=True))


def _lines(path: Path) -> list[str]:
    check_can_be_read_whole(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte-order mark is no part of the first word
        # `splitlines` would also split at Unicode's other line separators.
        return [line.strip() for line in text.removesuffix("\n").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise BapipeError(f"{path}: cannot be read: {error}; want UTF-8 text, a sentence per line") from None


def _listed(path: Path, vocabulary_size: int) -> _Listed:
    words = tuple(line.split()[0] for line in _lines(path) if line.strip())[: vocabulary_size - END - 1]
    return _Listed(words=words, number={word: END + 1 + place for place, word in enumerate(words)})


def _subwords(texts: Texts, vocabulary_size: int) -> Vocabulary:
    return trained([text for pair in texts for text in pair if text.strip()], vocabulary_size)
