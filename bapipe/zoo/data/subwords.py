"""A vocabulary of subwords, trained on the texts that it encodes, and cached."""

import hashlib
import io
import logging
from collections.abc import Sequence
from typing import Any

from bapipe.errors import BapipeError
from bapipe.formats.cache import load_bytes, store_bytes

_UNKNOWN = 1

_MAX_SENTENCES = 1_000_000
"""Maximum number of sentences to train on; of more, evenly spaced ones are used."""


class Subwords:
    """Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909) by sentencepiece; tokens 0 to 3 are marks."""

    def __init__(self, model: bytes) -> None:
        self._model, self._processor = model, _sentencepiece().SentencePieceProcessor(model_proto=model)

    def __reduce__(self) -> tuple[type["Subwords"], tuple[bytes]]:
        return Subwords, (self._model,)

    def __len__(self) -> int:
        size: int = self._processor.get_piece_size()
        return size

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the numbers of a sentence's subwords."""
        return tuple(self._processor.encode(text))

    def decode(self, words: Sequence[int]) -> str:
        """Returns the sentence that the subwords spell; other numbers are shown as unknown."""
        text: str = self._processor.decode([word if word < len(self) else _UNKNOWN for word in words])
        return text


def trained(sentences: Sequence[str], size: int) -> Subwords:
    """Returns at most `size` subwords for sentences: from the cache if they were trained before on the same sentences.

    Padding, an unknown word, the beginning and the end of a sentence are words 0 to 3.

    Raises:
        BapipeError: sentencepiece is not installed, or the size is too small for all letters.
    """
    sentencepiece = _sentencepiece()
    looked_at = sentences[:: -(-len(sentences) // _MAX_SENTENCES)]
    content = hashlib.sha256(f"{sentencepiece.__version__} {size}".encode())
    for sentence in looked_at:
        content.update(sentence.encode() + b"\n")
    name = f"{content.hexdigest()[:16]}.subwords.model"
    model = load_bytes(name)
    if model is None:
        logging.getLogger(__name__).info("training %s subwords on %s sentences", f"{size:,}", f"{len(looked_at):,}")
        model = _train(sentencepiece, looked_at, size)
        store_bytes(name, model)
    return Subwords(model)


def _train(sentencepiece: Any, sentences: Sequence[str], size: int) -> bytes:
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=written,
            vocab_size=size,
            hard_vocab_limit=False,  # a short text has fewer
            model_type="bpe",
            num_threads=1,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            max_sentence_length=1 << 16,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rpartition("] ")[2]
        raise BapipeError(
            f"no {size} subwords can be trained: {reason} Build the model with a larger vocabulary_size"
        ) from None
    return written.getvalue()


def _sentencepiece() -> Any:
    try:
        import sentencepiece  # other data does not need it
    except ImportError:
        raise BapipeError(
            "sentences are split into subwords with sentencepiece, which is not installed: pip install sentencepiece; "
            "or give the folder a vocabulary.txt, one word per line"
        ) from None
    return sentencepiece
