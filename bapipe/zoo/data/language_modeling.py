"""Texts to train language models on: synthetic ones, Python's manual, or files of the user."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bapipe.errors import BapipeError
from bapipe.zoo.data.dataset import NUM_SYNTHETIC
from bapipe.zoo.data.file_check import check_can_be_read_whole

PAD, MASK = 0, 1
"""The first words of the vocabulary of masked texts: marks."""

IGNORED = -100
"""Target of words that are not to be predicted, which torch's cross entropy ignores."""

_NUM_BYTES = 256

MaskedItem = tuple[tuple[Tensor, Tensor, Tensor], Tensor]
"""((tokens, segments, is_word), target), each [length]"""


def next_token_texts(spec: str, *, vocabulary_size: int, length: int) -> Dataset[tuple[Tensor, Tensor]]:
    """Returns pairs of a text, as int64 tokens [length], and the same shifted by one token.

    `spec` is `synthetic`; `pydoc`, the manual that comes with Python; or a file or a folder of `.txt` files. The tokens
    of files are bytes.

    Raises:
        BapipeError: no such data, or fewer than 256 words for bytes.
    """
    return _NextTokenTexts(texts=_texts(spec, vocabulary_size, length + 1, first=0))


def masked_texts(spec: str, *, vocabulary_size: int, length: int) -> Dataset[MaskedItem]:
    """Returns texts in two segments, padded to `length`, with 15 % of their words to predict.

    Of these, 80 % are replaced by a mark, 10 % by a random word, and 10 % are unchanged (Devlin et al. 2018, section
    3.1). `spec` is as in `next_token_texts`.
    """
    texts = _texts(spec, vocabulary_size, length, first=MASK + 1)
    return _MaskedTexts(texts=texts, vocabulary_size=vocabulary_size, length=length)


class _Texts(Protocol):
    """Texts of one length; a text is found by its number."""

    def __len__(self) -> int: ...
    def text(self, index: int) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Synthetic:
    """Three words of four are the successor of the word before; the others are drawn by Zipf's law.

    Text i depends on i alone.
    """

    first: int
    vocabulary_size: int
    length: int

    def __len__(self) -> int:
        return NUM_SYNTHETIC

    def text(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        num_words = self.vocabulary_size - self.first
        drawn = (num_words + 1) ** torch.rand(self.length, generator=generator, dtype=torch.float64)
        fresh = torch.rand(self.length, generator=generator) < 0.25
        fresh[0] = True
        place = torch.arange(self.length)
        latest = torch.where(fresh, place, 0).cummax(0).values  # begin of the run of successors that a word belongs to
        words = drawn.long().clamp(max=num_words) - 1
        return self.first + (words[latest] + place - latest) % num_words


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bytes:
    """Consecutive pieces of a long text."""

    content: bytes
    first: int
    length: int

    def __len__(self) -> int:
        return len(self.content) // self.length

    def text(self, index: int) -> Tensor:
        piece = self.content[index * self.length : (index + 1) * self.length]
        return self.first + torch.frombuffer(bytearray(piece), dtype=torch.uint8).long()


@dataclass(frozen=True, slots=True, kw_only=True)
class _NextTokenTexts(Dataset[tuple[Tensor, Tensor]]):
    texts: _Texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        text = self.texts.text(_checked(index, len(self)))
        return text[:-1], text[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MaskedTexts(Dataset[MaskedItem]):
    """Each text is cut after at least half of its words; random choices depend on the number of the text alone."""

    texts: _Texts
    vocabulary_size: int
    length: int

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> MaskedItem:
        text = self.texts.text(_checked(index, len(self)))
        generator = torch.Generator().manual_seed(NUM_SYNTHETIC + index)
        num_words = int(torch.randint((self.length + 1) // 2, self.length + 1, (), generator=generator))
        place = torch.arange(self.length)
        is_word = place < num_words
        text = torch.where(is_word, text, PAD)
        chosen = torch.randperm(num_words, generator=generator)[: max(1, round(0.15 * num_words))]
        target = torch.full_like(text, IGNORED)
        target[chosen] = text[chosen]
        tokens = text.clone()
        fate = torch.rand(len(chosen), generator=generator)
        any_word = torch.randint(MASK + 1, self.vocabulary_size, (len(chosen),), generator=generator)
        tokens[chosen] = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, any_word, text[chosen]))
        segments = (is_word & (place >= num_words // 2)).long()
        return (tokens, segments, is_word), target


def _checked(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(index)
    return index


def _texts(spec: str, vocabulary_size: int, length: int, first: int) -> _Texts:
    if spec == "synthetic":
        return _Synthetic(first=first, vocabulary_size=vocabulary_size, length=length)
    if vocabulary_size < first + _NUM_BYTES:
        raise BapipeError(
            f"data '{spec}' is read byte by byte, and the model knows {vocabulary_size} words: build it with "
            f"vocabulary_size={first + _NUM_BYTES} or more"
        )
    content = _content(spec)
    if len(content) < length:
        raise BapipeError(f"data '{spec}' has {len(content)} bytes, and one text takes {length}: give more")
    return _Bytes(content=content, first=first, length=length)


def _content(spec: str) -> bytes:
    if spec == "pydoc":
        found = find_spec("pydoc_data.topics")
        if found is None or found.origin is None:
            raise BapipeError("data 'pydoc': this Python comes without its manual; give a file or folder of text")
        return Path(found.origin).read_bytes()
    path = Path(spec)
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise BapipeError(f"data '{spec}' holds no .txt files: want a folder with some")
    for file in files:
        check_can_be_read_whole(file)
    try:
        return b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise BapipeError(
            f"data '{spec}' cannot be read: {error.strerror}; want synthetic, pydoc, a file, or a folder of .txt files"
        ) from None
